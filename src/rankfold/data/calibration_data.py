"""The calibration set: samples, where they came from, and how they were drawn.

Shape legend: S samples, S' samples held out, T tokens of a sample.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, OptionError
from .batches import Data, Example, digest_of
from .hub import HUB

EARLIER_KEYS = {  # of a description in a record -> the key of today
    "samples": "num_samples",
    "length": "max_length",
    "longest": "max_length",
    "field": "text_column",
    "samples_wanted": "num_samples_wanted",
}


@dataclass(frozen=True)
class TextShare:
    """One text of a mixture."""

    name: str  # as the user named it
    origin: str
    draw: str  # how its samples were drawn
    share: float  # wanted of all samples
    num_samples: int  # samples of it in the fit
    held_out: int  # and out of it

    def describe(self) -> dict:
        """Return the entry of the run record."""
        facts = asdict(self)
        return {"source": shown(facts.pop("name")), **facts}


@dataclass(frozen=True)
class CalibrationData:
    """Samples to calibrate a model on, and where they came from (:func:`rankfold.load_calibration`)."""

    # (S, T) int64 token ids; (S, C, H, W) floating-point pixels; or examples, which differ in length: sequences,
    # image-text examples or images. Moments are measured on these.
    ids: Data
    name: str  # the source as the user named it, or its type
    origin: str
    seed: int
    held_out: Data | None = None  # further samples of the same draw that nothing is fitted to
    draw: str = "windows of the whole text"  # how the samples were drawn
    patches: int = 0  # of an image of one size
    texts: tuple[TextShare, ...] = ()  # of a mixture
    wanted: int | None = None  # samples that were asked for, where fewer may have been found
    text_column: str | None = None  # column that was read, where it is not the usual one
    shards: int = 1  # contiguous parts that are measured one by one; several processes share them

    def __post_init__(self):
        if self.shards < 1:
            raise OptionError(f"shards must be >= 1, got {self.shards}")
        for name, samples in (("ids", self.ids), ("held_out", self.held_out)):
            if samples is not None or name == "ids":
                _check_samples(name, samples)

    @property
    def kind(self) -> str | None:
        """Name what the samples are; ``None`` for sequences of one length."""
        if isinstance(self.ids, Tensor):
            return "images" if self.ids.dim() == 4 else None
        if self.ids[0].ids is None:
            return "images"
        return "image-text examples" if any(example.images for example in self.ids) else "sequences"

    @property
    def sha256(self) -> str:
        """Return the digest of all samples that are fitted."""
        return digest_of(self.ids)

    @property
    def tokens(self) -> int:
        """Count the tokens of all samples that are fitted: of text, patches of images, or both."""
        if not isinstance(self.ids, Tensor):
            return sum(example.tokens for example in self.ids)
        return len(self.ids) * self.patches if self.ids.dim() == 4 else self.ids.numel()

    @property
    def max_length(self) -> int:
        """Return the tokens of the longest sample."""
        if isinstance(self.ids, Tensor):
            return self.tokens // len(self.ids)
        return max(example.tokens for example in self.ids)

    def describe(self) -> dict[str, Any]:
        """Return the entry of the run record."""
        described: dict[str, Any] = {
            "source": " + ".join(f"{shown(text.name)}={text.share:.3g}" for text in self.texts) or shown(self.name),
            "origin": self.origin,
            "draw": self.draw,
            "num_samples": len(self.ids),
            "max_length": self.max_length,
            "tokens": self.tokens,
            "seed": self.seed,
            "sha256": self.sha256,
            "held_out": 0 if self.held_out is None else len(self.held_out),
        }
        if self.shards > 1:  # sums depend on it
            described["shards"] = self.shards
        if self.held_out is not None:
            described["held_out_sha256"] = digest_of(self.held_out)
        if self.texts:
            described["texts"] = [text.describe() for text in self.texts]
        if not isinstance(self.ids, Tensor) and self.kind == "image-text examples":
            described["with_images"] = sum(example.images for example in self.ids)
        optional = {"text_column": self.text_column, "num_samples_wanted": self.wanted, "kind": self.kind}
        return described | {key: value for key, value in optional.items() if value is not None}


def mean_length(description: Mapping) -> int:
    """Return the mean tokens of a sample, rounded down, of a description (:meth:`CalibrationData.describe`)."""
    return description["tokens"] // description["num_samples"]


def upgrade_calibration(record):
    """Return a record with the keys of today in its descriptions of calibration data.

    Args:
        record: of a run, of moments or of a comparison, of whatever version; what is no record comes back as it is.
    """
    if not isinstance(record, dict):
        return record
    described = {key: _upgraded(record[key]) for key in ("calibration", "tokens") if key in record}
    measures = record.get("measures")  # of a comparison
    if isinstance(measures, dict) and isinstance(measures.get("texts"), list):
        texts = [_renamed(text, {"field": "text_column"}) for text in measures["texts"]]
        described["measures"] = measures | {"texts": texts}
    return record | described | ({"before": upgrade_calibration(record["before"])} if "before" in record else {})


def _upgraded(description):
    found = _renamed(description, EARLIER_KEYS)
    if isinstance(found, dict) and isinstance(found.get("texts"), list):
        found["texts"] = [_renamed(text, EARLIER_KEYS) for text in found["texts"]]
    return found


def _renamed(facts, names: dict[str, str]):
    return {names.get(key, key): value for key, value in facts.items()} if isinstance(facts, dict) else facts


def shown(name: str, folders: int = 0) -> str:
    """Return the name of a text source without folders of this machine, or with so many of them."""
    if name.startswith(HUB):
        return name
    alias, _, local = name.partition(":")
    short = Path(*Path(local or name).parts[-1 - folders :])
    return f"{alias}:{short}" if local else str(short)


def _check_samples(name: str, samples) -> None:
    if isinstance(samples, tuple) and samples and all(isinstance(sample, Example) for sample in samples):
        return
    if isinstance(samples, Tensor) and samples.is_floating_point() and samples.dim() == 4 and len(samples):
        if not torch.isfinite(samples).all():
            raise DataError(f"{name} holds NaN or infinite pixels; give others")
        return
    check_ids(name, samples, " or pixels (images, channels, height, width),")


def check_ids(name: str, ids, others: str = "") -> None:
    """Raise :class:`DataError` unless these are sequences of token ids; ``others``: what else they may be."""
    if not isinstance(ids, Tensor) or ids.dtype is not torch.int64 or ids.dim() != 2:
        got = f"{list(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise DataError(f"{name} must be a tensor (samples, length) of int64 token ids,{others} got {got}")
    if ids.shape[0] < 1 or ids.shape[1] < 2:
        raise DataError(f"{name} must hold at least one sample of at least 2 tokens, got {list(ids.shape)}")
    if int(ids.min()) < 0:
        raise DataError(f"{name} holds the negative token id {int(ids.min())}; padding is no text, leave it out")
