"""Which units stay, by what the gradient of the loss says of their weights."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ....architectures import BlockView
from ....calibration.moments import BlockMoments
from ....linalg.saliency import damage, taylor
from ....linalg.slicing import largest
from .method import Slicing
from .units import Sliceable, sliceable


@dataclass(frozen=True)
class GradientSlicing(Slicing):
    """Units by a statistic of the gradient of the dense model's loss, from one backward pass over some windows."""

    kind: ClassVar[str]  # of the statistic, for every layer of a unit

    def gradients(self, view: BlockView) -> set[str]:
        there = sliceable(view)
        modules = self.supported_modules(view.architecture, view)
        return {f"{layer}_{self.kind}" for module in modules for layer in there[module].layers}

    def measured(self, units: Sliceable, moments: BlockMoments) -> list[Tensor]:
        """The statistic by unit, each ``(n, c, ...)`` as :meth:`Sliceable.weights`."""
        return units.parts({name: moments[f"{name}_{self.kind}"].total for name in units.layers})


@dataclass(frozen=True)
class OBD(GradientSlicing):
    """The units stay whose weights cost the loss most by the diagonal of the empirical Fisher, of sequences.

    Optimal Brain Damage (LeCun et al., 1989) on units in place of single weights. Biases have no share in the choice.
    Left out: training in between, and removing a few at a time with the Fisher measured anew.
    """

    name: ClassVar[str] = "obd"
    kind: ClassVar[str] = "fisher"

    def keep(self, units, moments, rank: int) -> Tensor:
        return largest(damage(units.weights(), self.measured(units, moments)), rank)


@dataclass(frozen=True)
class LLMPruner(GradientSlicing):
    """The units stay whose weights times their gradients are largest, absolute values summed over all coupled layers.

    LLM-Pruner (arXiv:2305.11627), block-wise, element-wise importance of first order, sum over the group: what its
    published commands use. Its groups are the hidden units and heads here. Left out: the second-order term,
    channel-wise pruning of the stream, and the training of LoRA adapters that recovers what is lost. The paper leaves
    the first and last blocks dense: ``exclude_blocks`` does.
    """

    name: ClassVar[str] = "llm-pruner"
    kind: ClassVar[str] = "weight_gradient"

    def keep(self, units, moments, rank: int) -> Tensor:
        return largest(taylor(units.weights(), self.measured(units, moments)), rank)
