"""Token ids for calibration: packed, seeded, hashed.

Shape legend: S samples (windows), T window length.
"""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import DataError, OptionError
from .text import Text, read_text

__all__ = ["Tokens", "load_tokens", "pack"]

log = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 8  # generous for English; how much of an endless text is read


@dataclass(frozen=True)
class Tokens:
    """Windows of token ids and where they came from."""

    ids: Tensor  # (S, T) int64
    name: str  # the text source as the user named it
    origin: str
    seed: int
    held_out: Tensor | None = None  # (S', T) windows kept out of the fit, to check it on

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()[:32]

    def describe(self) -> dict:
        """For the run record."""
        samples, length = self.ids.shape
        alias, _, local = self.name.partition(":")
        return {
            "source": f"{alias}:{Path(local).name}" if local else Path(self.name).name,
            "origin": self.origin,
            "samples": samples,
            "length": length,
            "tokens": samples * length,
            "seed": self.seed,
            "sha256": self.sha256,
        }


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
    name: str, source, *, samples: int = 128, length: int = 2048, seed: int = 0, field: str = "text"
) -> Tokens:
    """Token windows for calibrating ``source``.

    The paper calibrates on 128 x 2048 tokens (MoDeGPT Sec. 4.1). Both numbers are clamped to what the model's context and
    the text give, which is logged.

    Args:
        name: see :func:`rankfold.calibration.text.read_text`, or ``self`` for text sampled from the model itself.
        source: an open model; its tokenizer and vocabulary are used.
        samples, length: ``>= 1``.
        seed: of the draw (and of the sampling for ``self``).
        field: column of a jsonl or parquet file.

    Raises:
        DataError: too little text, or token ids outside the model's vocabulary.
        OptionError: ``samples`` or ``length`` below 1.
    """
    if samples < 1 or length < 2:
        raise OptionError(f"samples must be >= 1 and length >= 2, got {samples} and {length}")
    if length > source.context_length:
        log.info("length %d is more than the model's context; using %d", length, source.context_length)
        length = source.context_length
    if name == "self":
        return Tokens(_sample_from_model(source, samples, length, seed), name, "self", seed)
    text = read_text(name, field=field, characters=max(samples * length * CHARACTERS_PER_TOKEN, 1_000_000))
    ids = encode(text, source)
    if ids.numel() < length:
        shorter = 2 ** (ids.numel().bit_length() - 1)
        if shorter < 32:
            raise DataError(
                f"text source {name!r} has {ids.numel()} tokens; at least 32 are needed, and {samples * length} wanted"
            )
        log.info("the text has %d tokens, less than one window; using length %d", ids.numel(), shorter)
        length = shorter
    windows = pack(ids, samples=samples, length=length, seed=seed)
    if len(windows) < samples:
        log.info("the text fills %d windows of %d tokens, not the %d asked for", len(windows), length, samples)
    return Tokens(windows, name, text.origin, seed)


def encode(text: Text, source) -> Tensor:
    """``(n,)`` token ids of a text, checked against the model's vocabulary.

    Raises:
        DataError: the tokenizer gives ids that the embedding does not have.
    """
    ids = source.tokenizer(text.joined(), return_tensors="pt", verbose=False).input_ids[0]
    check_vocabulary(ids, source.config.vocab_size)
    return ids


def check_vocabulary(ids: Tensor, vocabulary: int) -> None:
    """Raise :class:`DataError` where an id has no embedding."""
    if ids.numel() and int(ids.max()) >= vocabulary:
        raise DataError(
            f"the tokenizer gives token id {int(ids.max())}, the model has {vocabulary} embeddings; tokenizer and model do "
            "not belong together"
        )


@torch.no_grad()
def _sample_from_model(source, samples: int, length: int, seed: int) -> Tensor:
    """Text the model writes itself, from its start token, at temperature 1: calibration without any data."""
    model = source.whole_model()
    start = getattr(source.config, "bos_token_id", None)
    start = start if start is not None else source.tokenizer.bos_token_id
    if start is None:
        start = source.tokenizer.eos_token_id
    generator = torch.Generator(device=source.device).manual_seed(seed)
    batches = []
    for n in torch.full((samples,), 1).split(16):
        ids = torch.full((len(n), 1), start, dtype=torch.long, device=source.device)
        cache, step = None, ids
        while ids.shape[1] < length:
            out = model(step, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            probabilities = out.logits[:, -1].float().softmax(-1)
            step = torch.multinomial(probabilities, 1, generator=generator)
            ids = torch.cat([ids, step], dim=1)
        batches.append(ids.cpu())
    return torch.cat(batches)
