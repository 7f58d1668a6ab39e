"""Windows of token ids and where they came from.

Shape legend: S samples (windows), S' windows held out, T window length.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import DataError
from .batches import digest_of
from .hub import HUB

__all__ = ["Part", "Tokens", "check_ids", "shown"]


@dataclass(frozen=True)
class Part:
    """One text of several."""

    name: str  # as the user named it
    origin: str
    draw: str  # how its windows were drawn
    share: float  # wanted of all windows
    samples: int  # windows it has in the fit
    held_out: int  # and out of it

    def describe(self) -> dict:
        """For the run record."""
        return {
            "source": shown(self.name),
            "origin": self.origin,
            "draw": self.draw,
            "share": self.share,
            "samples": self.samples,
            "held_out": self.held_out,
        }


@dataclass(frozen=True)
class Tokens:
    """Windows of token ids and where they came from."""

    ids: Tensor  # (S, T) int64, what moments are measured on
    name: str  # the text source as the user named it
    origin: str
    seed: int
    held_out: Tensor | None = None  # (S', T) int64, further windows of the same draw that nothing is fitted to
    draw: str = "windows of the whole text"  # how the windows were drawn
    parts: tuple[Part, ...] = ()  # of a mix of several texts
    wanted: int | None = None  # samples that were asked of a mix, images or examples; there may be fewer
    field: str | None = None  # column they were read from, where it is not the usual one

    def __post_init__(self):
        check_ids("ids", self.ids)
        if self.held_out is not None:
            check_ids("held_out", self.held_out)

    @property
    def sha256(self) -> str:
        return digest_of(self.ids)

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self.ids.shape[1]

    def describe(self) -> dict:
        """For the run record."""
        samples, length = len(self.ids), self.length
        described = {
            "source": " + ".join(f"{shown(p.name)}={p.share:.3g}" for p in self.parts) or shown(self.name),
            "origin": self.origin,
            "draw": self.draw,
            "samples": samples,
            "length": length,
            "tokens": samples * length,
            "seed": self.seed,
            "sha256": self.sha256,
            "held_out": 0 if self.held_out is None else len(self.held_out),
        }
        if self.held_out is not None:
            described["held_out_sha256"] = digest_of(self.held_out)
        if self.parts:
            described["texts"] = [part.describe() for part in self.parts]
        if self.field is not None:
            described["field"] = self.field
        if self.wanted is not None:
            described["samples_wanted"] = self.wanted
        return described


def shown(name: str, folders: int = 0) -> str:
    """A text source without folders of this machine, or with so many of them."""
    if name.startswith(HUB):
        return name
    alias, _, local = name.partition(":")
    short = Path(*Path(local or name).parts[-1 - folders :])
    return f"{alias}:{short}" if local else str(short)


def check_ids(name: str, ids) -> None:
    if not isinstance(ids, Tensor) or ids.dtype is not torch.int64 or ids.dim() != 2:
        got = f"{list(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise DataError(f"{name} must be a tensor (windows, length) of int64 token ids, got {got}")
    if ids.shape[0] < 1 or ids.shape[1] < 2:
        raise DataError(f"{name} must hold at least one window of at least 2 tokens, got {list(ids.shape)}")
    if int(ids.min()) < 0:
        raise DataError(f"{name} holds the negative token id {int(ids.min())}; padding is no text, leave it out")
