"""Blocks whose weights have few directions lose most.

Shape legend: L modules, O outputs and N inputs of a layer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import DenseModelMeasures, RanksBySparsity
from .prunable import PrunableModule
from .sparsities import around


@dataclass(frozen=True)
class Spectrum(RanksBySparsity):
    """Keep of every block an amount proportional to the effective rank of its weights."""

    name: ClassVar[str] = "spectrum"

    def measure(self, dense: DenseModelMeasures) -> dict[int, float]:
        """Measure block -> effective rank."""
        return dense.of_blocks(lambda view: effective_rank([W for p in view.readers.values() for W in view.weights(p)]))

    def sparsities(
        self, modules: list[PrunableModule], weights: Tensor, average: float, measured: dict[int, float]
    ) -> tuple[Tensor, dict[str, Any]]:
        ranks = torch.tensor([measured[m.block] for m in modules], dtype=torch.float64)
        facts = {"effective_rank": {str(block): rank for block, rank in measured.items()}}
        return spectrum_sparsities(ranks, weights, average), facts


def effective_rank(weights: Sequence[Tensor]) -> float:
    r"""Return the mean over a block's parameters of :math:`e^{H(p)} / \min(O, N)`, the effective rank of a layer.

    Roy and Vetterli (2007). ``H`` is the entropy of the layer's singular values, :math:`p_i = \sigma_i / \sum_j
    \sigma_j`. In (0, 1]; 0 where all weights are.

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
    """Return sparsities with which what is kept is proportional to the effective rank.

    Args:
        ranks: ``(L,)`` of :func:`effective_rank`.
        weights, average: as for :func:`outlier_sparsities`.
    """
    mean = (ranks * weights).sum() / weights.sum()
    return around(average, -(1 - average) * ranks / mean if mean > 0 else torch.zeros_like(ranks), weights)
