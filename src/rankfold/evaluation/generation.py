"""Text a model writes."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import GenerationConfig

from .._utils.sizes import plural
from ..architectures import context_of
from ..checkpoint.load import load_model, load_tokenizer
from ..data.chats import has_half_character
from ..data.tokens import tokenised
from ..errors import CheckpointError, DataError, NumericsError, OptionError, first_line, option
from ..models.auto_classes import check_writes


def generate_text(model: str | Path, prompt: str, *, dtype: str = "auto", device: str = "auto", **options) -> str:
    """Load a model by name and continue a prompt; see :func:`continue_text` for the options."""
    network = load_model(model, dtype=dtype, device=device)
    check_writes(network.config, str(model))
    return continue_text(network, load_tokenizer(model), prompt, **options)


def continue_text(
    model, tokenizer, prompt: str, *, max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0
) -> str:
    """Return what the model writes after ``prompt``, the prompt not included.

    Raises:
        OptionError: ``max_new_tokens`` below 1, or more than the model's context has room for; or a negative
            temperature.
        DataError: the prompt is no text, has no tokens, or more than the model's context has room for.
        CheckpointError: the model's generation settings are damaged.
        NumericsError: the model predicts NaN.
    """
    check_sampling(max_new_tokens, temperature)
    ids = _ids_of_prompt(model, tokenizer, prompt, max_new_tokens)
    [written] = generate_ids(
        model, tokenizer, ids[None], max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
    )
    return text_after(tokenizer, ids, written)


def check_sampling(max_new_tokens: int, temperature: float) -> None:
    """Raise :class:`OptionError` where no token is to be written, or the temperature is negative."""
    if max_new_tokens < 1 or temperature < 0:
        raise OptionError(f"max-new-tokens must be >= 1 and temperature >= 0, got {max_new_tokens} and {temperature}")


@torch.no_grad()
def generate_ids(
    model,
    tokenizer,
    ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    streamer=None,
    others: Mapping[str, Tensor] = MappingProxyType({}),
) -> Tensor:
    """Return the ``(B, m)`` ids that a model writes after the ``(B, n)`` ids of prompts of one length.

    Args:
        others: further inputs of the model by name, such as the pixels of images, on its device.
        streamer: of transformers, for one prompt; gets each token as soon as it is written.

    Raises:
        CheckpointError: the model's generation settings are damaged.
        NumericsError: the model predicts NaN.
    """
    batch = ids.to(model.device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    devices = [] if model.device.type == "cpu" else [model.device]
    with torch.random.fork_rng(devices, device_type=model.device.type):  # the caller's random state is not ours
        torch.manual_seed(seed)
        try:
            written = model.generate(
                input_ids=batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=max_new_tokens,
                pad_token_id=padding_of(tokenizer),
                num_beams=1,  # one text, whatever the settings beside the weights ask for
                num_return_sequences=1,
                logits_processor=[finite_scores],
                streamer=streamer,
                **sampling,
                **others,
            )
        except (TypeError, ValueError) as error:  # what transformers raises for settings that are no settings
            raise CheckpointError(
                f"the model cannot generate with its settings ({first_line(error)}); correct or remove its "
                "generation_config.json, or correct config.json"
            ) from error
    return written[:, ids.shape[1] :].cpu()


@contextlib.contextmanager
def ends_alone(model) -> Iterator[None]:
    """Leave of the settings beside the weights only the tokens that begin and end a text.

    What is measured is the likeliest text: a penalty for repeating, which many instruct models come with, would hide
    how much a model repeats, and change its exact answers.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig(bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id)
    try:
        yield
    finally:
        model.generation_config = own


def text_after(tokenizer, ids: Tensor, written: Tensor) -> str:
    """Return the text of the ``(m,)`` ids written after the ``(n,)`` ids of a prompt.

    A tokenizer may drop the space before what it decodes first, so the prompt is decoded too.
    """
    whole = torch.cat([ids, written])
    begin, text = (tokenizer.decode(some, skip_special_tokens=True) for some in (ids, whole))
    return text[len(begin) :]


def _ids_of_prompt(model, tokenizer, prompt: str, max_new_tokens: int) -> Tensor:
    """Return the ``(n,)`` token ids of a prompt that leaves room for what is to be written."""
    if not isinstance(prompt, str) or has_half_character(prompt):
        raise DataError(f"the prompt is not UTF-8 text, got {str(prompt)[:40]!a}; convert it")
    config = model.config.get_text_config()

    def encoded(text: str) -> Tensor:
        return tokenised(tokenizer, text, type(model).__name__, config.vocab_size)

    ids, positions = encoded(prompt), context_of(config)
    if not len(ids):
        raise DataError("the prompt is empty; give some text to continue")
    if not positions or len(ids) + max_new_tokens <= positions:
        return ids
    asked = f"{plural(len(ids), 'token')} of prompt and {max_new_tokens} more"
    got = f"{asked} do not fit into the model's context of {positions}"
    if len(ids) < positions:
        raise OptionError(f"{got}; use a shorter prompt or {option('max_new_tokens', positions - len(ids))}")
    room = positions - min(max_new_tokens, positions // 2)
    kept = _last_characters(prompt, encoded, room)
    fewer = f" and {option('max_new_tokens', positions - room)}" if positions - room < max_new_tokens else ""
    raise DataError(f"{got}; use the last {plural(kept, 'character')} of the prompt{fewer}")


def _last_characters(prompt: str, encoded: Callable[[str], Tensor], room: int) -> int:
    """Return how many characters at the end of a prompt have no more tokens than there is room; a cut may change
    tokens, so each is tried."""
    kept = len(prompt)
    while (count := len(encoded(prompt[-kept:]))) > room and kept > 1:
        kept = max(1, min(kept - 1, kept * room // count))
    return kept


def padding_of(tokenizer) -> int | None:
    """Return the id that fills up a text that ended before others."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


def finite_scores(_, scores: Tensor) -> Tensor:
    """Return the logits of the next token, of which minus infinity is what must not follow; raise for NaN."""
    if not (scores < torch.inf).all():  # NaN is not less either
        raise NumericsError(
            "the model predicts NaN or infinity; its weights or its config are damaged, or try "
            f"{option('dtype', 'float32')}"
        )
    return scores
