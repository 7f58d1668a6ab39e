"""Keeping some units of a layer as they are: which ones, and what the others would have sent.

Shape legend: n units, c channels each sends into the next projection (1 for a hidden unit, a group of heads has many),
D width of the output, r units kept.
"""

from functools import reduce
from operator import add

import torch
from torch import Tensor


def norm_scores(parts: list[Tensor]) -> Tensor:
    """``(n,)`` Euclidean norm of all weights of a unit (Han et al., arXiv:1506.02626, for groups of weights).

    Args:
        parts: weights of the unit, each ``(n, ...)``.
    """
    return reduce(add, (part.double().flatten(1).square().sum(1) for part in parts)).sqrt()


def fluctuation_scores(W: Tensor, variance: Tensor, units: int) -> Tensor:
    r"""``(n,)`` fluctuation of what a unit sends: :math:`\sum_j \mathrm{Var}(x_j) \|W_{:j}\|^2` over its channels.

    The weighted input feature variance of FLAP (arXiv:2312.11983), summed where a unit has several channels.

    Args:
        W: ``(D, n c)`` output projection.
        variance: ``(n c,)`` of its input.
        units: n.
    """
    return (W.double().square().sum(0) * variance).unflatten(0, (units, -1)).sum(1)


def largest(scores: Tensor, rank: int) -> Tensor:
    """``(r,)`` ascending places of the largest scores; of equal ones the first."""
    return scores.argsort(descending=True, stable=True)[:rank].sort().values


def evenly_spaced(units: int, rank: int) -> Tensor:
    """``(r,)`` ascending places, one in the middle of every run of ``units / rank``."""
    return (2 * torch.arange(rank) + 1) * units // (2 * rank)


def channels_of(units: Tensor, width: int) -> Tensor:
    """Channels of some units, ``width`` each, in the order of the units."""
    return (units[:, None] * width + torch.arange(width, device=units.device)).flatten()


def lost_energy(W: Tensor, C: Tensor, lost: Tensor) -> tuple[Tensor, Tensor]:
    """``E||L x||^2`` of what is lost and ``E||W x||^2``.

    Args:
        W: ``(D, F)``.
        C: ``(F, F)`` second moment of ``x``, or about the point that a bias takes up.
        lost: ``(D, F)`` ``L``; channels of which it has nothing are left out of the product.
    """
    W, at = W.double(), lost.any(0).nonzero()[:, 0]
    gap = lost[:, at].double()
    return ((gap @ C[at][:, at]) * gap).sum(), ((W @ C) * W).sum()
