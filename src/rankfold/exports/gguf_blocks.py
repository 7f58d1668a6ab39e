"""Matrices in the formats of GGUF files that take 32 numbers at a time: a step in fp16, and a code for each number."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..linalg.block_rounding import BLOCK, Rounded


@dataclass(frozen=True)
class BlockFormat:
    """One format.

    Attributes:
        levels: half the number of codes.
        finer: format of the values of attention, whose few rows lose most.
        tolerance: how far logits of a file may be apart from those before it, of their norm.
    """

    levels: int
    finer: str
    tolerance: float


# Q8_0 rounds every number by itself; its steps are a 127th of the largest of 32.
FORMATS = {
    "q8_0": BlockFormat(128, "q8_0", 0.1),
    "q5_0": BlockFormat(16, "q8_0", 0.5),
    "q4_0": BlockFormat(8, "q5_0", 0.7),
}
# Numbers of these are rounded for what layers receive; those of the finest one by one.
ROUNDED = tuple(name for name, format in FORMATS.items() if format.finer != name)


def packed(rounded: Rounded, format: str) -> np.ndarray:
    """``(O, bytes)`` rows of a matrix as they stand in a file, in one of :data:`FORMATS`."""
    levels = FORMATS[format].levels
    codes = rounded.codes.view(len(rounded.codes), -1, BLOCK)
    parts = [rounded.steps.contiguous().view(torch.uint8).unflatten(1, (-1, 2))]
    if format == "q8_0":
        parts.append(codes.view(torch.uint8))
    else:
        codes = (codes + levels).to(torch.uint8)  # from 0
        if format == "q5_0":
            parts.append(_fifth_bits(codes))
        low, high = (codes & 15).split(BLOCK // 2, 2)
        parts.append(low | high << 4)
    return torch.cat(parts, 2).flatten(1).numpy()


def _fifth_bits(codes: Tensor) -> Tensor:
    """``(O, n, 4)`` of codes ``(O, n, 32)``, the first in the lowest bit."""
    places = torch.arange(8, dtype=torch.uint8)
    return ((codes >> 4).unflatten(2, (4, 8)) << places).sum(3, dtype=torch.uint8)
