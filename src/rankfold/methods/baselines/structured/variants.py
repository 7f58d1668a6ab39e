"""Which units stay: by their weights, by nothing, by how much what they send fluctuates."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ....linalg.slicing import evenly_spaced, fluctuation_scores, largest, norm_scores
from .method import Slicing


@dataclass(frozen=True)
class Magnitude(Slicing):
    """The units whose weights have the largest Euclidean norm stay.
    Calibration text gives the errors reported, no choice.
    """

    name: ClassVar[str] = "magnitude"

    def keep(self, units, moments, rank: int) -> Tensor:
        return largest(norm_scores(units.weights()), rank)


@dataclass(frozen=True)
class Strided(Slicing):
    """Every n-th unit stays, whatever it does ("uniform pruning").
    Calibration text gives the errors reported, no choice.
    """

    name: ClassVar[str] = "strided"

    def keep(self, units, moments, rank: int) -> Tensor:
        return evenly_spaced(units.count, rank).to(units.output.weight.device)


@dataclass(frozen=True)
class FLAP(Slicing):
    """The units stay whose contribution fluctuates most, and a bias takes what the others send on average.

    FLAP (arXiv:2312.11983): weighted input feature variance and bias compensation. Where an output projection has no
    bias it gets one, as in the paper; that is D parameters for each module sliced. Left out: the paper's search for a
    structure over the whole model by standardised scores. Ranks come from ``allocation`` instead, by default the same
    share of every module. A group of heads has the sum of its channels; the authors' code squares each channel first.
    """

    name: ClassVar[str] = "flap"
    workspace: ClassVar[tuple[float, float]] = (3.0, 1.0)  # a covariance and what it is made of

    def takes_mean(self, output) -> bool:
        return True

    def keep(self, units, moments, rank: int) -> Tensor:
        variance = moments[units.statistic].covariance().diagonal()
        return largest(fluctuation_scores(units.output.weight, variance, units.count), rank)
