"""Token ids for calibration, drawn out of texts: tokenised, packed, seeded.

Shape legend: S samples (windows), T window length.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .._utils.evaluating import evaluating
from ..errors import CheckpointError, DataError, OptionError, first_line
from .batches import Data, Example, tokens_in
from .chats import Chat, has_half_character, written
from .mixing import Drawn, Portion, check_distinct, draw_all, held_out_of, interleaved, shares_of
from .special_tokens import frame_of
from .streaming import pieces_of_file_or_hub, pieces_of_text
from .text import Text, column_of, read_text, text_source
from .windows import Part, Tokens

__all__ = ["Tokens", "load_tokens", "pack"]

log = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 8  # generous for English; how much of a large text is tokenised for a window


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
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    return windows[order[:samples]].contiguous()


def load_tokens(
    name: str | Path | Sequence[str | Path] | Mapping[str | Path, float],
    source,
    *,
    samples: int = 128,
    length: int = 2048,
    seed: int = 0,
    field: str = "text",
) -> Tokens:
    """Token windows for calibrating ``source``, drawn at random over the whole text, or over several.

    The papers calibrate on 128 x 2048 tokens (MoDeGPT Sec. 4.1). Both numbers are clamped to what the model's context and
    the text give, which is logged. A text of up to 16 MiB is tokenised as a whole and cut into windows, of which some are
    drawn; of a larger one random pieces are tokenised, one window each (:mod:`.streaming`). Windows never overlap.

    An encoder reads whole texts: every window is given the special tokens its tokenizer puts around one. A decoder that is lost
    without its start token (Gemma) has it in front of every window.

    Behind the ``samples`` windows come a few more of the same draw that nothing is fitted to, ``held_out``: one for eight
    samples, at least one and at most 8. Where the text has too few windows they are taken out of the samples; a single
    window is fitted.

    Of several texts each gives its share of the fitted and of the held-out windows, in a random order of texts; what one
    lacks the others give, and all windows are as short as those of the text that has the shortest (:mod:`.mixing`).

    Args:
        name: see :func:`rankfold.data.text.read_text`, or ``self`` for text sampled from the model itself. A list of
            names: texts with equal shares. A mapping: name -> share, any positive numbers.
        source: an open model; its tokenizer and vocabulary are used.
        samples: ``>= 1``, and at least one for every text; of all texts together.
        length: ``>= 2``.
        seed: of the draw of each text, and of the order of texts (and of the sampling for ``self``).
        field: column of a file with rows.

    Raises:
        DataError: too little text, or token ids outside the model's vocabulary.
        OptionError: ``samples`` or ``length`` out of range, a text named twice, or a share that is no positive number.
    """
    shares = shares_of(name)
    if source.part.takes_images:
        raise OptionError(f"the {source.part.name} part of {source.name} takes images; use load_images")
    if samples < 1 or length < 2:
        raise OptionError(f"samples must be >= 1 and length >= 2, got {samples} and {length}")
    if samples < len(shares):
        raise OptionError(
            f"{len(shares)} calibration texts need at least as many samples, got {samples}; give more samples"
        )
    if not -(2**63) <= seed < 2**63:
        raise OptionError(f"seed must fit into 64 bits, got {str(seed)[:24]}...; choose a smaller number")
    if length > source.context_length:
        log.info("length %d is more than the model's context; using %d", length, source.context_length)
        length = source.context_length
    if len(shares) > 1:
        check_distinct([*shares], ["self" if text == "self" else text_source(text).origin for text in shares])

    def draw(text: str, portion: Portion, length: int) -> Drawn:
        count = sum(portion)
        if text == "self":
            if not source.architecture.decoder:
                raise OptionError(
                    f"{source.name} is an encoder and writes no text of its own; calibrate on another text"
                )
            return Drawn(_sample_from_model(source, portion.fitted, count, length, seed), "self", "sampled")
        return _draw(text, source, field, count, length, seed)

    tokens = _together(draw_all(shares, samples, length, draw), shares, samples, seed)
    return replace(tokens, field=column_of(shares, field))


def _together(texts: dict[str, tuple[Drawn, Portion]], shares: dict[str, float], samples: int, seed: int) -> Tokens:
    """One set of windows of one or several texts."""
    fitted = interleaved([text.windows[: count.fitted] for text, count in texts.values()], seed)
    held_out = interleaved([text.windows[count.fitted : sum(count)] for text, count in texts.values()], seed)
    if (found := len(fitted) + len(held_out)) < (wanted := samples + held_out_of(samples)):
        log.info(
            "%s %d windows of %d tokens, not %d: %d are fitted, %d held out",
            "the text fills" if len(texts) == 1 else "the texts fill",
            *(found, fitted.shape[1], wanted, len(fitted), len(held_out)),
        )
    parts = tuple(
        Part(name, text.origin, text.draw, shares[name], count.fitted, count.held_out)
        for name, (text, count) in texts.items()
    )
    kept = held_out if len(held_out) else None
    if len(parts) == 1:
        return Tokens(fitted, parts[0].name, parts[0].origin, seed, kept, parts[0].draw)
    origin = " + ".join(part.origin for part in parts)
    return Tokens(fitted, " + ".join(shares), origin, seed, kept, "texts interleaved", parts, samples)


def _draw(name: str, source, field: str, count: int, length: int, seed: int) -> Drawn:
    """Up to ``count`` windows of a text."""
    frame = frame_of(source.architecture, source.tokenizer)
    if length <= frame.tokens:
        raise OptionError(f"length must be more than the {frame.tokens} special tokens of a window, got {length}")
    large = pieces_of_file_or_hub(name, field=field, seed=seed, size=length * CHARACTERS_PER_TOKEN)
    if large is None:
        text = read_text(name, field=field)
        large = pieces_of_text(text, seed)
        if large is None:
            windows = _windows_of_text(text, source, count, length - frame.tokens, seed)
            return Drawn(frame.around(windows), text.origin, Tokens.draw)
    windows = list(_windows_of_pieces(large.pieces, source, count, length - frame.tokens, seed))
    if not windows:
        raise DataError(f"text source {name!r} has less than one window of {length} tokens; choose a smaller length")
    return Drawn(frame.around(torch.stack(windows)), large.origin, large.draw)


def _windows_of_text(text: Text, source, count: int, length: int, seed: int) -> Tensor:
    ids = encode(text, source)
    if ids.numel() < length:
        shorter = 2 ** (ids.numel().bit_length() - 1)
        if shorter < 32:
            raise DataError(
                f"text source {text.name!r} has {ids.numel()} tokens; at least 32 are needed, and {count * length} wanted "
                f"({count} windows of {length}); give more text"
            )
        log.info("the text has %d tokens, less than one window; using length %d", ids.numel(), shorter)
        length = shorter
    return pack(ids, samples=count, length=length, seed=seed)


def _windows_of_pieces(pieces: Iterator[str | Chat], source, count: int, length: int, seed: int) -> Iterator[Tensor]:
    """Up to ``count`` windows ``(T,)``: pieces are joined until they fill one, and what is left over is dropped.

    Of a long piece a random stretch is taken. No special tokens are added, as there are none inside a whole text.
    """
    generator, wanted = torch.Generator().manual_seed(seed), length * CHARACTERS_PER_TOKEN
    joined, enough = "", wanted * 5 // 8
    for document in pieces:
        piece = written(document, source.tokenizer, source.name)
        if (extra := len(piece) - wanted) > 0:
            begin = int(torch.randint(extra + 1, (), generator=generator))
            piece = piece[begin : begin + wanted]
        joined = f"{joined}\n\n{piece}" if joined else piece
        if len(joined) < enough:
            continue
        ids = _tokenised(joined, source, add_special_tokens=False)
        if len(ids) < length:
            enough = len(joined) * 5 // 4
            continue
        yield ids[:length]
        count, joined, enough = count - 1, "", wanted * 5 // 8
        if not count:
            return


def encode(text: Text, source) -> Tensor:
    """``(n,)`` token ids of a text, checked against the model's vocabulary; without the special tokens that stand around every
    window of it.

    Raises:
        DataError: the tokenizer gives ids that the embedding does not have.
    """
    inside = frame_of(source.architecture, source.tokenizer).inside
    return ids_of(text, source.tokenizer, source.name, source.config.vocab_size, **inside)


def ids_of(text: Text, tokenizer, name: str, vocabulary: int, **options) -> Tensor:
    """Return the ``(n,)`` token ids of a text; arguments as for :func:`tokenised`. A chat template writes its special tokens
    itself."""
    options |= {"add_special_tokens": False} if text.has_chats else {}
    return tokenised(tokenizer, text.joined(tokenizer, name), name, vocabulary, **options)


def _tokenised(text: str, source, **options) -> Tensor:
    return tokenised(source.tokenizer, text, source.name, source.config.vocab_size, **options)


def tokenised(tokenizer, text: str, name: str, vocabulary: int, **options) -> Tensor:
    """``(n,)`` int64 token ids.

    Args:
        name: of the model, for messages.
        options: of the tokenizer's call.

    Raises:
        CheckpointError: the tokenizer cannot be used, or makes nothing of a text.
        DataError: the text is not Unicode, or the tokenizer gives ids that the embedding does not have.
    """
    if has_half_character(text):
        raise DataError("the text has half a character (a lone surrogate) in it: it is not UTF-8; convert it")
    try:
        ids = tokenizer(text, return_tensors="pt", verbose=False, **options).input_ids[0].long()
    except (TypeError, ValueError, AttributeError, KeyError) as error:  # settings that are no settings
        raise CheckpointError(
            f"the tokenizer of {name} cannot be used ({first_line(error)}); put its own tokenizer files beside the weights"
        ) from error
    if text.strip() and not ids.numel():
        raise CheckpointError(
            f"the tokenizer of {name} makes no tokens of a text of {len(text)} characters; put its own tokenizer files beside "
            "the weights"
        )
    check_vocabulary(ids, vocabulary)
    return ids


def check_fits(ids: Data, source) -> None:
    """Whether a model can run on these windows, images or examples.

    Raises:
        DataError: an id has no embedding, windows are longer than the positions the model has, images have another shape
            than it takes, or it takes no image-text examples.
    """
    if not isinstance(ids, Tensor):
        return _check_examples(ids, source)
    if source.part.takes_images:
        return _check_pixels(ids, source)
    if ids.dim() != 2:
        raise DataError(f"the {source.part.name} part of {source.name} takes token ids, got images; calibrate on text")
    check_vocabulary(ids, source.config.vocab_size)
    if source.part.positions and ids.shape[1] > source.part.positions:
        raise DataError(
            f"windows of {ids.shape[1]} tokens are longer than the model's context of {source.part.positions}; cut them shorter"
        )


def _check_examples(examples: tuple[Example, ...], source) -> None:
    alone = [example.ids is None for example in examples]
    if all(alone) and source.part.packed:
        return
    if any(alone):
        raise DataError(
            f"the {source.part.name} part of {source.name} takes no images of any size by themselves; calibrate on "
            f"{'images of one size' if source.part.takes_images else 'text or image-text examples'}"
        )
    if source.image_token is None:
        raise DataError(
            f"the {source.part.name} part of {source.name} takes no image-text examples; calibrate on "
            f"{'images' if source.part.takes_images else 'text'}"
        )
    longest = max(example.tokens for example in examples)
    if source.part.positions and longest > source.part.positions:
        raise DataError(
            f"an example of {longest} tokens, images among them, is longer than the model's context of "
            f"{source.part.positions}; leave it out, or have its images made smaller"
        )
    for example in examples:
        said = example.ids[example.ids != source.image_token]
        check_vocabulary(said, source.config.vocab_size)
        if not (example.ids[:, 1:] != source.image_token).any():
            raise DataError("an example has no text behind its first token, so nothing can be predicted; leave it out")


def _check_pixels(pixels: Tensor, source) -> None:
    part = source.part
    wanted = "any size, an example each" if part.packed else f"{list(part.image_shape)} (channels, height, width)"
    if part.packed or pixels.shape[1:] != part.image_shape:
        raise DataError(
            f"the {part.name} part of {source.name} takes images of {wanted}, got {list(pixels.shape[1:])}; calibrate on a "
            "folder of images (rankfold.load_images)"
        )


def say_if_few(ids: Data, source) -> None:
    """A line in the log where there are fewer tokens than the widest moment has dimensions: it has no full rank then."""
    view = source.meta_block(0)
    widest = max(view.attention.output.weight.shape[1], view.mlp.hidden if view.mlp else 0)
    tokens = tokens_in(ids, source.part)
    if tokens < widest:
        log.warning(
            "%d calibration tokens are too few: the widest moment has %d dimensions and needs at least as many, better four "
            "times; give more or longer windows",
            *(tokens, widest),
        )


def check_vocabulary(ids: Tensor, vocabulary: int) -> None:
    """Raise :class:`DataError` where an id has no embedding."""
    if ids.numel() and int(ids.max()) >= vocabulary:
        raise DataError(
            f"the tokenizer gives token id {int(ids.max())}, the model has {vocabulary} embeddings; tokenizer and model do "
            "not belong together"
        )


def _sample_from_model(source, samples: int, count: int, length: int, seed: int) -> Tensor:
    model = source.whole_model()
    with evaluating(model):
        return _sampled(model, source, samples, count, length, seed)


@torch.no_grad()
def _sampled(model, source, samples: int, count: int, length: int, seed: int) -> Tensor:
    """``(count, T)``: text the model writes itself, from its start token, at temperature 1; calibration without any data.

    The first ``samples`` do not depend on ``count``.
    """
    start = getattr(source.config, "bos_token_id", None)
    start = start if start is not None else source.tokenizer.bos_token_id
    if start is None:
        start = source.tokenizer.eos_token_id
    generator = torch.Generator(device=source.device).manual_seed(seed)
    batches = []
    for rows in [len(part) for wanted in (samples, count - samples) for part in torch.empty(wanted).split(16)]:
        ids = torch.full((rows, 1), start, dtype=torch.long, device=source.device)
        cache, step = None, ids
        while ids.shape[1] < length:
            out = model(step, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            probabilities = out.logits[:, -1].float().softmax(-1)
            step = torch.multinomial(probabilities, 1, generator=generator)
            ids = torch.cat([ids, step], dim=1)
        batches.append(ids.cpu())
    return torch.cat(batches)
