"""Blocks that change the residual stream little lose most: MoDeGPT (arXiv:2408.09632) Eq. 11 and App. B.11.

Shape legend: L modules that get a sparsity each.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import OptionError
from .base import DenseModelMeasures, RanksBySparsity
from .prunable import PrunableModule

Influences = dict[int, tuple[float, ...]]  # block -> of the block, of its attention, of its MLP
MLP_MODULES = ("mlp", "experts", "gate", "up", "down")  # the rest belong to the attention half of a block
MAX_SPARSITY_RULE = 0.8  # App. B.2: choose epsilon so that the largest layer sparsity is around 80 %
# Temperature over the spread of the scores; a colder one would make much of differences that mean nothing.
COLDEST = 1e-3


@dataclass(frozen=True)
class Influence(RanksBySparsity):
    """Give every block a sparsity that falls with its influence, one minus the cosine of its input and output (Eq. 11).

    Attributes:
        temperature: the paper's epsilon, > 0; large is uniform. ``None``: the paper's rule, largest sparsity 0.8.
    """

    name: ClassVar[str] = "influence"
    statistic: ClassVar[str | None] = "influence"

    temperature: float | None = None

    def __post_init__(self):
        if self.temperature is not None:
            self.check("temperature", "> 0", lambda value: value > 0)

    def measure(self, dense: DenseModelMeasures) -> Influences:
        """Measure block -> influence of the block, of its attention, of its MLP."""
        return {block: tuple(mean.tolist()) for block, mean in dense.means("influence").items()}

    def sparsities(
        self, modules: list[PrunableModule], weights: Tensor, average: float, measured: Influences | None
    ) -> tuple[Tensor, dict[str, Any]]:
        if measured is None:
            raise OptionError(f"allocation {self.name!r} needs scores of the dense model, and there are none")
        s = self._scores(modules, measured)
        temperature = self.temperature or temperature_for(s, weights, average)
        facts = {
            "temperature": temperature if math.isfinite(temperature) else None,
            "scores": {str(block): scores for block, scores in measured.items()},
        }
        return softmax_sparsities(s, weights, average, temperature), facts

    def _scores(self, modules: list[PrunableModule], measured: Influences) -> Tensor:
        return torch.tensor([measured[m.block][0] for m in modules], dtype=torch.float64)


@dataclass(frozen=True)
class ModuleInfluence(Influence):
    """Give attention and MLP of every block sparsities of their own, each by its influence.

    The exponent is that of Eq. 43, whose constant misses the weighted mean; the constant here meets it.
    """

    name: ClassVar[str] = "influence-modules"

    def _scores(self, modules: list[PrunableModule], measured: Influences) -> Tensor:
        own = [measured[m.block][2 if m.module in MLP_MODULES else 1] for m in modules]
        return torch.tensor(own, dtype=torch.float64) * _shares(modules)


def _shares(modules: list[PrunableModule]) -> Tensor:
    """Return the weight of each module's half of the block, with mean 3/2 over the two halves.

    It is the paper's w_mlp = 2, w_mha = 1 (Eq. 42) where the MLP holds two thirds of the parameters.
    """
    halves: dict[tuple[int, bool], int] = {}
    for m in modules:
        key = (m.block, m.module in MLP_MODULES)
        halves[key] = halves.get(key, 0) + m.dense
    blocks = {block: halves.get((block, False), 0) + halves.get((block, True), 0) for block, _ in halves}
    share = [3 * halves[m.block, m.module in MLP_MODULES] / blocks[m.block] for m in modules]
    return torch.tensor(share, dtype=torch.float64)


def softmax_sparsities(scores: Tensor, weights: Tensor, average: float, temperature: float) -> Tensor:
    r"""Return the sparsity ``phi`` of every layer, high where the score is low; MoDeGPT Eq. 11.

    Maximises :math:`\sum_i w_i (s_i (1 - \phi_i) - \varepsilon \phi_i \log \phi_i)`, ``w`` the weights, under the
    average: :math:`\phi_i = c\, e^{-s_i / \varepsilon}`, with ``c`` so that the WEIGHTED mean of ``phi`` is
    ``average``. With equal weights this is the paper's Eq. 10, and ``c`` its :math:`L \phi_{avg} / \sum_j e^{-s_j /
    \varepsilon}`. Entries may exceed 1; see :func:`capped_sparsities`.

    Args:
        scores: ``(L,)`` importance, e.g. ``1 - cos(input, output)``.
        weights: ``(L,)`` parameters of each, any positive scale.
        average: wanted mean, in [0, 1).
        temperature: epsilon, ``> 0``; large is uniform.
    """
    shape = (-(scores - scores.min()) / temperature).exp()
    return shape * (average * weights.sum() / (shape * weights).sum())


def temperature_for(scores: Tensor, weights: Tensor, average: float, largest: float = MAX_SPARSITY_RULE) -> float:
    """Return the temperature at which the largest sparsity is ``largest``: the paper's rule, by bisection.

    It is ``inf`` (uniform) where all scores are equal or the average is already at ``largest``. Where the lowest scores
    nearly tie, the largest sparsity stays below: not less than a thousandth of the spread of the scores is returned.
    """
    spread = (scores.max() - scores.min()).item()
    if spread == 0 or average >= largest or average == 0:
        return float("inf")
    low, high = spread * COLDEST, spread * 1e4
    for _ in range(200):
        middle = (low * high) ** 0.5
        top = softmax_sparsities(scores, weights, average, middle).max().item()
        low, high = (middle, high) if top > largest else (low, middle)
    return high
