"""How much of every block goes, by one number of each: outliers of its weights, or their spectrum.

Shape legend: L units (a unit has the number of its block), O outputs and N inputs of a layer.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["BY_BLOCK", "by_block", "effective_rank", "outlier_fraction", "outlier_sparsities", "spectrum_sparsities"]


# Allocations by one number of every block -> what it is called in the record.
BY_BLOCK = {"owl": "outliers", "spectrum": "effective_rank"}


def by_block(method, scores: Tensor, weights: Tensor, average: float) -> Tensor:
    """Sparsities by the allocation of a method.

    Args:
        scores: ``(L,)`` of the block of each unit.
        weights, average: as for :func:`outlier_sparsities`.
    """
    if method.allocation == "owl":
        return outlier_sparsities(scores, weights, average, method.spread)
    return spectrum_sparsities(scores, weights, average)


def outlier_fraction(weights: Sequence[Tensor], energies: Sequence[Tensor], factor: float) -> float:
    r"""Share of a block's weights whose :math:`|W_{ij}| \, \|x_j\|` is over ``M`` times the mean of the block.

    The layerwise outlier distribution of OWL (arXiv:2310.05175, Sec. 3).

    Args:
        weights: ``(O, N)`` of every layer.
        energies: ``(N,)`` mean square of every input of it.
        factor: ``M > 0``.
    """
    scores = [W.double().abs() * x.double().sqrt() for W, x in zip(weights, energies, strict=True)]
    count = sum(score.numel() for score in scores)
    limit = factor * sum(score.sum() for score in scores) / count
    return sum(int((score > limit).sum()) for score in scores) / count


def outlier_sparsities(fractions: Tensor, weights: Tensor, average: float, spread: float) -> Tensor:
    r"""Sparsities that fall with the share of outliers, around ``average``: OWL (arXiv:2310.05175, Sec. 3).

    Shares are scaled to run over :math:`[0, 2\lambda]` and taken away from the sparsity, whose weighted mean stays.

    Args:
        fractions: ``(L,)`` of :func:`outlier_fraction`.
        weights: ``(L,)`` parameters of each, any positive scale.
        average: wanted mean, in [0, 1).
        spread: :math:`\lambda \ge 0`.
    """
    width = fractions.max() - fractions.min()
    scaled = (fractions - fractions.min()) / width if width > 0 else torch.zeros_like(fractions)
    return _around(average, -2 * spread * scaled, weights)


def effective_rank(weights: Sequence[Tensor]) -> float:
    r"""Mean over a block's parameters of :math:`e^{H(p)} / \min(O, N)`, the effective rank of a layer (Roy and Vetterli 2007).

    ``H`` is the entropy of the layer's singular values, :math:`p_i = \sigma_i / \sum_j \sigma_j`. In (0, 1]; 0 where all
    weights are.

    Args:
        weights: ``(O, N)`` of every layer of a block.
    """
    count = sum(W.numel() for W in weights)
    return sum(W.numel() * _share_of_rank(W.double()) for W in weights) / count


def _share_of_rank(W: Tensor) -> float:
    gram = W.T @ W if W.shape[0] > W.shape[1] else W @ W.T  # its eigenvalues cost a fraction of an SVD of W
    sigma = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    if not sigma.any():
        return 0.0
    p = sigma / sigma.sum()
    return math.exp(-torch.xlogy(p, p).sum().item()) / len(p)


def spectrum_sparsities(ranks: Tensor, weights: Tensor, average: float) -> Tensor:
    """Sparsities with which what is kept is proportional to the effective rank.

    Args:
        ranks: ``(L,)`` of :func:`effective_rank`.
        weights, average: as for :func:`outlier_sparsities`.
    """
    mean = (ranks * weights).sum() / weights.sum()
    return _around(average, -(1 - average) * ranks / mean if mean > 0 else torch.zeros_like(ranks), weights)


def _around(average: float, deviation: Tensor, weights: Tensor) -> Tensor:
    """``average`` plus ``deviation`` about its weighted mean; drawn together where a sparsity would be negative."""
    deviation = deviation - (deviation * weights).sum() / weights.sum()
    lowest = deviation.min().item()
    return average + deviation * (average / -lowest if lowest < -average else 1.0)
