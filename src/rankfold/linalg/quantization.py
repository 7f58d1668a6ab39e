"""Chunk-wise uniform quantisation, and low-rank factors refined under it.

Shape legend: O output width, N input width, R rank.

LatentLLM (arXiv:2505.18413), App. I.1. A chunk is a run of ``chunk`` numbers in row-major order; the last one may be
shorter.

This module imports torch and rankfold.linalg only: no modules, no hooks, no device policy.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rankfold.linalg.lowrank import metric_error
from rankfold.linalg.psd import all_finite, check_moment, damping

__all__ = ["Quantized", "QuantizedFactors", "dequantize", "quantize", "refine_quantized"]


class Quantized(NamedTuple):
    """Result of :func:`quantize`: ``x = low + scale * codes``, chunk by chunk."""

    codes: Tensor  # (numel,) uint8, or int32 above 8 bits; one code per entry, not packed
    scale: Tensor  # (chunks,)
    low: Tensor  # (chunks,) smallest value
    shape: tuple[int, ...]
    bits: int
    chunk: int


class QuantizedFactors(NamedTuple):
    """Result of :func:`refine_quantized`."""

    B: Quantized  # (O, R)
    A: Quantized  # (R, N)
    loss_history: list[float]  # relative error of the quantised product per step; the first is plain rounding
    relative_error: float  # the smallest of them


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


@torch.no_grad()
def refine_quantized(
    W: Tensor, B: Tensor, A: Tensor, C: Tensor, *, bits: int, chunk: int, steps: int = 30
) -> QuantizedFactors:
    r"""Move low-rank factors so that their rounded values fit better.

    Minimises :math:`\|(W - Q[B] Q[A]) C^{1/2}\|^2` with the straight-through estimator of LatentLLM Eq. 239-240:
    gradients are taken at the rounded factors and applied to hidden unrounded ones. The paper leaves optimiser and
    step open. Here each factor's gradient is preconditioned by its own (damped) curvature, so the only step is a
    fraction of the exact least-squares move: no learning rate depends on the data. The best iterate is returned,
    never worse than plain rounding.

    Args:
        W: ``(O, N)`` dense weight.
        B, A: ``(O, R)``, ``(R, N)`` unrounded factors; a balanced junction (``symmetric`` or ``block_identity_*``)
            rounds best.
        C: ``(N, N)`` second moment of the inputs; fp32 or fp64, any scale.
        bits, chunk: format of both factors.
        steps: ``>= 0``.

    Returns:
        :class:`QuantizedFactors`.

    Raises:
        ValueError: shapes disagree, format or ``steps`` out of range.

    Cost per step: O(O N R + R N^2).
    """
    check_moment(C, W.shape[1])
    if B.shape[0] != W.shape[0] or A.shape[1] != W.shape[1] or B.shape[1] != A.shape[0]:
        raise ValueError(
            f"B (out, r) A (r, in) must match W {tuple(W.shape)}, got {tuple(B.shape)} and {tuple(A.shape)}"
        )
    if steps < 0:
        raise ValueError(f"steps must be >= 0, got {steps}")
    W, B, A = W.to(C), B.to(C), A.to(C)
    best, history = None, []
    for step in range(steps + 1):
        q_B, q_A = quantize(B, bits=bits, chunk=chunk), quantize(A, bits=bits, chunk=chunk)
        QB, QA = dequantize(q_B, C.dtype), dequantize(q_A, C.dtype)
        gap = W - QB @ QA
        error = metric_error(gap, W, C)
        if best is None or error < min(history):
            best = (q_B, q_A)
        history.append(error)
        pull = 0.5 / (1 + step) ** 0.5  # shrinking, so that the hidden factors settle between levels
        weighted = QA @ C
        if step % 2 == 0:
            B = B + pull * _solve(weighted @ QA.T, (gap @ weighted.T).T).T
        else:
            A = A + pull * _solve(QB.T @ QB, QB.T @ gap)
    return QuantizedFactors(*best, history, min(history))


def _solve(G: Tensor, K: Tensor) -> Tensor:
    G = G.clone()
    G.diagonal().add_(damping(G, 1e-6) + torch.finfo(G.dtype).tiny)
    return torch.linalg.solve(G, K)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """(chunks, chunk) in at least fp32, the last chunk filled up with its last value."""
    flat = x.flatten() if x.dtype == torch.float64 else x.flatten().float()
    missing = -flat.numel() % chunk
    return torch.cat([flat, flat[-1:].expand(missing)]).view(-1, chunk)
