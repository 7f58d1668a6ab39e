"""q/k-norms of heads that lost dimensions: the mean square they divide by is predicted from what is left.

Shape legend: H heads of queries or keys, N head dimension, R kept of it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...architectures import AttentionView
from ...linalg.mean_square import fit_mean_square

SQUARES = ("query_squares", "key_squares")
NAMES = ("q_norm", "k_norm")


class Norms(NamedTuple):
    """The norms of queries and keys of one attention."""

    tensors: dict[str, Tensor]  # of the runtime modules, by name
    errors: tuple[float, float]  # RMS relative error of the mean squares of queries and of keys


def predict_norms(attention: AttentionView, moments, kept: tuple[Tensor, Tensor]) -> Norms:
    """Fit what the norms of queries and keys divide by.

    Args:
        kept: ``(H, R)`` dimensions of every query head, and of every key head.
    """
    tensors, errors = {}, []
    for name, statistic, norm, keep in zip(NAMES, SQUARES, attention.head_norms, kept, strict=True):
        N, heads = attention.head_dim, len(keep)
        among = keep if attention.spec.norm_over == "head" else _of_all_heads(keep, N)
        fit = fit_mean_square(moments[statistic].second_moment(), among, eps=norm.eps)
        constant = (fit.constant / heads * len(among)).expand(heads)  # summed over what the norm is over
        tensors |= _tensors(name, _scales(norm.scale, keep, N), fit.squares.view(heads, -1), constant)
        errors.append(fit.error.mean().sqrt().item())
    query, key = errors
    return Norms({name: t.to(attention.output.weight.dtype) for name, t in tensors.items()}, (query, key))


def first_norms(attention: AttentionView, rank: int) -> dict[str, Tensor]:
    """Norms of the shapes that ``rank`` dimensions lead to; what is in them does not matter."""
    weight = attention.output.weight
    found = {}
    for name, heads in zip(NAMES, (attention.heads, attention.kv_heads), strict=True):
        ones = weight.new_ones(heads, rank)
        found |= _tensors(name, ones, ones.clone(), weight.new_ones(heads))
    return found


def norm_parameters(attention: AttentionView, rank: int) -> int:
    """Change in the numbers of both norms where ``rank`` dimensions of every head are kept."""
    heads = attention.heads + attention.kv_heads
    before = sum(0 if norm.scale is None else norm.scale.numel() for norm in attention.head_norms)
    return heads * (2 * rank + 1) - before


def _of_all_heads(keep: Tensor, N: int) -> Tensor:
    """``(1, H R)`` dimensions among those of all heads."""
    return (keep + N * torch.arange(len(keep), device=keep.device)[:, None]).flatten()[None]


def _scales(scale: Tensor | None, keep: Tensor, N: int) -> Tensor:
    """``(H, R)`` of one scale for all heads or one for each."""
    if scale is None:
        return torch.ones_like(keep, dtype=torch.float64)
    return scale.double().view(-1, N).expand(len(keep), -1).gather(1, keep)


def _tensors(name: str, weight: Tensor, squares: Tensor, constant: Tensor) -> dict[str, Tensor]:
    values = {"weight": weight, "root": squares.sqrt(), "floor": constant.sqrt()[:, None]}
    return {f"{name}.{key}": value for key, value in values.items()}
