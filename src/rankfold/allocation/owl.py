"""Blocks with many outliers among their weights lose least: OWL (arXiv:2310.05175).

Shape legend: L modules, O outputs and N inputs of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import DenseModelMeasures, RanksBySparsity
from .prunable import PrunableModule
from .sparsities import around


@dataclass(frozen=True)
class OWL(RanksBySparsity):
    """Give every block a sparsity that falls with the share of outliers among its weights.

    Attributes:
        threshold: a weight is an outlier where its size times the norm of its input is so many times the mean of its
            block, the paper's M, 3 to 10.
        spread: sparsities of blocks differ by at most twice this, the paper's lambda, 0.02 to 0.2.
    """

    name: ClassVar[str] = "owl"
    statistic: ClassVar[str | None] = "input_energy"

    threshold: float = 5.0
    spread: float = 0.08

    def __post_init__(self):
        self.check("threshold", "> 0; the paper takes 3 to 10", lambda value: value > 0)
        self.check("spread", "in [0, 1); the paper takes 0.02 to 0.2", lambda value: 0 <= value < 1)

    def measure(self, dense: DenseModelMeasures) -> dict[int, float]:
        """Measure block -> share of outliers."""
        energies = dense.means("input_energy")
        return dense.of_blocks(lambda view: _outliers(view, energies[view.index], self.threshold))

    def sparsities(
        self, modules: list[PrunableModule], weights: Tensor, average: float, measured: dict[int, float]
    ) -> tuple[Tensor, dict[str, Any]]:
        fractions = torch.tensor([measured[m.block] for m in modules], dtype=torch.float64)
        facts = {"outliers": {str(block): fraction for block, fraction in measured.items()}}
        return outlier_sparsities(fractions, weights, average, self.spread), facts


def _outliers(view: Any, energies: Tensor, threshold: float) -> float:
    """Compute the share of outliers; ``energies`` are of the inputs of all layers, one after the other."""
    weights = [view.weights(paths) for paths in view.readers.values()]
    inputs = energies.to(view.device).split([some[0].shape[1] for some in weights])
    pairs = [(W, x) for some, x in zip(weights, inputs, strict=True) for W in some]
    return outlier_fraction([W for W, _ in pairs], [x for _, x in pairs], threshold)


def outlier_fraction(weights: Sequence[Tensor], energies: Sequence[Tensor], factor: float) -> float:
    r"""Return the share of a block's weights whose :math:`|W_{ij}| \, \|x_j\|` is over ``M`` times the block's mean.

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
    r"""Return sparsities that fall with the share of outliers, around ``average``: OWL (arXiv:2310.05175, Sec. 3).

    Shares are scaled to run over :math:`[0, 2\lambda]` and taken away from the sparsity, whose weighted mean stays.

    Args:
        fractions: ``(L,)`` of :func:`outlier_fraction`.
        weights: ``(L,)`` parameters of each, any positive scale.
        average: wanted mean, in [0, 1).
        spread: :math:`\lambda \ge 0`.
    """
    width = fractions.max() - fractions.min()
    scaled = (fractions - fractions.min()) / width if width > 0 else torch.zeros_like(fractions)
    return around(average, -2 * spread * scaled, weights)
