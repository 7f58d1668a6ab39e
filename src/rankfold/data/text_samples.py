"""Sequences of token ids for calibration, drawn out of texts: tokenised, packed, seeded.

Shape legend: S samples (windows of a text), T tokens of one.
"""

import heapq
import logging
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .._utils.evaluating import cache_for, evaluating
from .._utils.sizes import plural
from ..errors import DataError, OptionError, option
from .calibration_data import CalibrationData, TextShare
from .chats import Chat, written
from .mixing import Drawn, DrawOptions, Portion, check_distinct, draw_all, interleaved, order_of
from .special_tokens import frame_of
from .streaming import Pieces
from .text import Text, text_source
from .tokens import encode, tokenised

log = logging.getLogger(__name__)

WRITTEN_AT_ONCE = 32_768  # tokens that a model writes side by side, whose keys and values are in memory
CHARACTERS_PER_TOKEN = 8  # generous for English; how much of a large text is tokenised for a sample
Read = Callable[[str, int], Text | Pieces]  # name and characters wanted of a piece -> a text, or pieces of a large one


def pack(ids: Tensor, *, samples: int, length: int, seed: int) -> Tensor:
    """Cut a token stream into non-overlapping windows and draw ``samples`` of them without replacement.

    Args:
        ids: ``(n,)`` token ids.
        samples: windows wanted; fewer come back where the text holds fewer.
        length: window length T.
        seed: order of the draw.

    Returns:
        ``(S, T)`` with ``S = min(samples, n // T)``.
    """
    windows = ids[: ids.numel() // length * length].view(-1, length)
    return windows[order_of(len(windows), seed)[:samples]].contiguous()


def samples_of_texts(shares: dict[str, float], model, options: DrawOptions, read: Read) -> CalibrationData:
    """Draw sequences at random over one text, or over several.

    A text of up to 16 MiB is tokenised as a whole and cut into samples, of which some are drawn; of a larger one random
    pieces are tokenised, one sample each (:mod:`.streaming`), and of long rows more where there are too few. Samples
    never overlap.

    An encoder reads whole texts: every sample is given the special tokens its tokenizer puts around one. A decoder that
    is lost without its start token (Gemma) has it before every sample.

    Args:
        shares: name of a text -> its share (:func:`.shares_of`); ``self`` is text sampled from the model.
        read: opens a text.

    Raises:
        DataError: too little text, or token ids outside the model's vocabulary.
        OptionError: fewer samples than texts, a text that is named twice, or ``self`` of a model that writes none.
    """
    if options.num_samples < len(shares):
        raise OptionError(
            f"{len(shares)} calibration texts need at least as many samples, got {options.num_samples}; "
            "give more samples"
        )
    length = options.max_length
    if length > model.context_length:
        log.info("%s %d is more than the model's context; using %d", option("max_length"), length, model.context_length)
        length = model.context_length
    if len(shares) > 1:
        check_distinct([*shares], ["self" if text == "self" else text_source(text).origin for text in shares])

    def draw(text: str, portion: Portion, length: int) -> Drawn:
        if text == "self":
            return _written_by(model, portion, length, options.seed)
        return _draw(text, model, sum(portion), length, options.seed, read)

    return _together(draw_all(shares, options.num_samples, length, draw), shares, options)


def _together(
    texts: dict[str, tuple[Drawn, Portion]], shares: dict[str, float], options: DrawOptions
) -> CalibrationData:
    """Return one set of samples of one or several texts."""
    seed = options.seed
    fitted = interleaved([text.windows[: count.fitted] for text, count in texts.values()], seed)
    held_out = interleaved([text.windows[count.fitted : sum(count)] for text, count in texts.values()], seed)
    is_short = (found := len(fitted) + len(held_out)) < options.wanted
    if is_short:
        log.info(
            "%s %s of %d tokens, not %d: %d fitted, %d held out",
            "the text fills" if len(texts) == 1 else "the texts fill",
            plural(found, "sample"),
            *(fitted.shape[1], options.wanted, len(fitted), len(held_out)),
        )
    parts = tuple(
        TextShare(name, text.origin, text.draw, shares[name], count.fitted, count.held_out)
        for name, (text, count) in texts.items()
    )
    held_out, wanted = held_out if len(held_out) else None, options.num_samples
    if len(parts) == 1:
        (part,) = parts
        wanted = wanted if is_short else None
        return CalibrationData(fitted, part.name, part.origin, seed, held_out, part.draw, wanted=wanted)
    names, origins = (" + ".join(texts) for texts in (shares, [part.origin for part in parts]))
    return CalibrationData(fitted, names, origins, seed, held_out, "texts interleaved", texts=parts, wanted=wanted)


def _draw(name: str, model, count: int, length: int, seed: int, read: Read) -> Drawn:
    """Return up to ``count`` samples of a text."""
    text = read(name, length * CHARACTERS_PER_TOKEN)
    frame = frame_of(model.architecture, model.tokenizer)
    if length <= frame.tokens:
        raise OptionError(
            f"{option('max_length')} must be more than the {frame.tokens} special tokens of a sample, got {length}"
        )
    if isinstance(text, Text):
        windows = _windows_of_text(text, model, count, length - frame.tokens, seed)
        return Drawn(frame.around(windows), text.origin, CalibrationData.draw)
    windows = list(_windows_of_pieces(text.pieces, model, count, length - frame.tokens, seed))
    if not windows:
        raise DataError(
            f"text source {name!r} has less than one sample of {length} tokens; choose a smaller {option('max_length')}"
        )
    return Drawn(frame.around(torch.stack(windows)), text.origin, text.draw)


def _windows_of_text(text: Text, model, count: int, length: int, seed: int) -> Tensor:
    ids = encode(text, model)
    if ids.numel() < length:
        shorter = 2 ** (ids.numel().bit_length() - 1)
        if shorter < 32:
            raise DataError(
                f"text source {text.name!r} has {plural(ids.numel(), 'token')}; at least 32 are needed, and "
                f"{count * length} wanted ({plural(count, 'sample')} of {length}); give more text"
            )
        log.info("the text has %s, less than one sample; using length %d", plural(ids.numel(), "token"), shorter)
        length = shorter
    return pack(ids, samples=count, length=length, seed=seed)


def _windows_of_pieces(pieces: Iterator[str | Chat], model, count: int, length: int, seed: int) -> Iterator[Tensor]:
    """Up to ``count`` windows ``(T,)``: pieces are joined until they fill one, and what is left over is dropped.

    No special tokens are added, as there are none inside a whole text.
    """
    wanted, joined = length * CHARACTERS_PER_TOKEN, ""
    enough = wanted * 5 // 8
    whole = (written(document, model.tokenizer, model.name) for document in pieces)
    for piece in stretches(whole, wanted, most=count, seed=seed):
        joined = f"{joined}\n\n{piece}" if joined else piece
        if len(joined) < enough:
            continue
        ids = tokenised(model.tokenizer, joined, model.name, model.config.vocab_size, add_special_tokens=False)
        if len(ids) < length:
            enough = len(joined) * 5 // 4
            continue
        yield ids[:length]
        count, joined, enough = count - 1, "", wanted * 5 // 8
        if not count:
            return


def stretches(pieces: Iterator[str], size: int, *, most: int, seed: int) -> Iterator[str]:
    """Yield a random stretch of every piece; then others of the long ones, drawn at random. None overlap.

    Args:
        pieces: each whole where it has no more than ``size`` characters.
        most: of the others, which are kept meanwhile; the first of them do not depend on how many.
    """
    generator, lots = torch.Generator().manual_seed(seed), random.Random(seed)
    kept = list[tuple[float, str]]()
    for piece in pieces:
        extra = len(piece) - size
        begin = int(torch.randint(extra + 1, (), generator=generator)) if extra > 0 else 0
        yield piece[begin : begin + size]
        others = (*range(begin - size, -1, -size), *range(begin + size, extra + 1, size))
        kept = heapq.nsmallest(most, [*kept, *((lots.random(), piece[n : n + size]) for n in others)])
    yield from (stretch for _, stretch in kept)


def _written_by(source, portion: Portion, length: int, seed: int) -> Drawn:
    """Return text that the model writes."""
    if not source.architecture.decoder:
        raise OptionError(f"{source.name} is an encoder and writes no text of its own; calibrate on another text")
    model = source.whole_model()
    with evaluating(model):
        return Drawn(_sampled(model, source, portion.fitted, sum(portion), length, seed), "self", "sampled")


@torch.no_grad()
def _sampled(model, source, samples: int, count: int, length: int, seed: int) -> Tensor:
    """``(count, T)``: text the model writes itself, from its start token, at temperature 1; calibration without any
    data.

    The first ``samples`` do not depend on ``count``.
    """
    start = getattr(source.config, "bos_token_id", None)
    start = start if start is not None else source.tokenizer.bos_token_id
    if start is None:
        start = source.tokenizer.eos_token_id
    generator = torch.Generator(device=source.device).manual_seed(seed)
    at_once, batches = max(1, WRITTEN_AT_ONCE // length), []
    parts = [len(part) for wanted in (samples, count - samples) for part in torch.empty(wanted).split(at_once)]
    for rows in filter(None, parts):  # of nothing there is one part, of none
        ids = torch.full((rows, 1), start, dtype=torch.long, device=source.device)
        cache, step = cache_for(model), ids
        while ids.shape[1] < length:
            step = draw_tokens(model(step, use_cache=True, **cache).logits[:, -1], generator)
            ids = torch.cat([ids, step], dim=1)
        batches.append(ids.cpu())
    return torch.cat(batches)


def draw_tokens(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token of each row, ``(B, 1)``, by the probabilities of its ``(B, V)`` logits.

    One number decides: torch.multinomial draws one for every token of the vocabulary, more work than a small model.
    """
    below = logits.float().softmax(-1).cumsum(-1)  # probability of this token and all before it
    drawn = torch.rand(len(logits), 1, generator=generator, device=logits.device) * below[:, -1:]
    return torch.searchsorted(below, drawn, right=True).clamp_(max=logits.shape[1] - 1)
