"""Chunk-wise uniform quantisation.

LatentLLM (arXiv:2505.18413), App. I.1. A chunk is a run of ``chunk`` numbers in row-major order; the last one may be
shorter.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rankfold.linalg.psd import all_finite


class Quantized(NamedTuple):
    """Result of :func:`quantize`: ``x = low + scale * codes``, chunk by chunk."""

    codes: Tensor  # (numel,) uint8, or int32 above 8 bits; one code per entry, not packed
    scale: Tensor  # (chunks,)
    low: Tensor  # (chunks,) smallest value
    shape: tuple[int, ...]
    bits: int
    chunk: int


@torch.no_grad()
def quantize(x: Tensor, *, bits: int, chunk: int, scale_dtype: torch.dtype = torch.float32) -> Quantized:
    r"""Round every chunk to ``2^bits`` evenly spaced levels between its extremes.

    LatentLLM Eq. 242. A constant chunk, where the formula divides by zero, gets scale 0. Scale and low are rounded to
    ``scale_dtype`` BEFORE the codes are chosen, so the error is at most half a step plus what rounding the extremes
    costs.

    Args:
        x: any shape, finite, float.
        bits: 1 to 16.
        chunk: numbers per chunk, ``>= 1``.
        scale_dtype: of scales and lows; with bf16 they cost ``32 / chunk`` bits per number.

    Raises:
        ValueError: ``bits`` or ``chunk`` out of range, empty or non-finite input.
    """
    if not 1 <= bits <= 16:
        raise ValueError(f"bits must be in [1, 16], got {bits}")
    if chunk < 1:
        raise ValueError(f"chunk must be >= 1, got {chunk}")
    if x.numel() == 0 or not all_finite(x):
        raise ValueError(f"x must be non-empty and finite, got shape {tuple(x.shape)}")
    work = _chunks(x, chunk)
    low, high = work.amin(1), work.amax(1)
    low = low.to(scale_dtype)
    scale = ((high - low.to(high)) / (2**bits - 1)).clamp_min(0).to(scale_dtype)
    step = torch.where(scale > 0, scale, torch.ones_like(scale)).to(work)[:, None]
    codes = ((work - low.to(work)[:, None]) / step).round().clamp(0, 2**bits - 1)
    codes = codes.to(torch.uint8 if bits <= 8 else torch.int32).flatten()[: x.numel()]
    return Quantized(codes, scale, low, tuple(x.shape), bits, chunk)


@torch.no_grad()
def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Tensor of the original shape, ``low + scale * code`` computed in ``dtype`` (at least fp32)."""
    work = dtype if dtype == torch.float64 else torch.float32
    codes = _chunks(q.codes.to(work), q.chunk)
    values = q.low.to(work)[:, None] + q.scale.to(work)[:, None] * codes
    return values.flatten()[: q.codes.numel()].view(q.shape).to(dtype)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """(chunks, chunk) in at least fp32, the last chunk filled up with its last value."""
    flat = x.flatten() if x.dtype == torch.float64 else x.flatten().float()
    missing = -flat.numel() % chunk
    return torch.cat([flat, flat[-1:].expand(missing)]).view(-1, chunk)
