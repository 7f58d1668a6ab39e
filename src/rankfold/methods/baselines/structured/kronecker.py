"""Which units stay, by a Fisher that is a Kronecker product for every layer.

Shape legend: n units, c channels each sends into the output projection, O outputs and N inputs of a layer, D model
width.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ....architectures import BlockView, Dense
from ....calibration.moments import BlockMoments, Moment
from ....linalg.elimination import others
from ....linalg.kronecker import compensated, diagonal_blocks, row_costs, schur_blocks, with_bias, with_one
from ....linalg.psd import damped
from ....linalg.slicing import channels_of, largest
from ...work import Work
from .gradients import GradientSlicing
from .units import Sliceable, sliceable

FACTOR = "the Fisher factor"
DAMPING = 0.01  # of the mean diagonal of a factor, LLM Surgeon's


@dataclass(frozen=True)
class KroneckerSlicing(GradientSlicing):
    """Units by a Fisher ``G (x) A`` of every layer (K-FAC): ``A`` of its inputs as they come, ``G`` of its gradients.

    A unit's cost is the sum of those of its rows in the layers before the output projection, and of its columns in
    that: layers are independent in K-FAC. The bias of a layer is one more column of its weight, for an input of one.
    """

    kind: ClassVar[str] = "gradient"

    def statistics(self, view: BlockView) -> set[str]:
        there = sliceable(view)
        modules = self.supported_modules(view.architecture, view)
        return super().statistics(view) | {there[module].entering for module in modules}

    def keep(self, units: Sliceable, moments: BlockMoments, rank: int) -> Tensor:
        columns, A = units.columns(), with_one(moments[units.entering].second_moment(), moments[units.entering].mean)
        metric = self.input_metric(units.output, moments[units.statistic])

        def factor(layer: str) -> Tensor:  # G (O, O)
            return moments[f"{layer}_{self.kind}"].second_moment()

        costs = row_costs(units.output.weight.T[columns], factor(units.last), self.blocks(metric, columns))
        for layer, index in units.rows:
            dense = units.layers[layer]
            rows = with_bias(dense.weight, dense.bias)[index]
            costs += row_costs(rows, A, self.blocks(factor(layer), index))
        return largest(costs, rank)

    def input_metric(self, output: Dense, moment: Moment) -> Tensor:
        """``(n c, n c)`` ``A`` of the output projection's own inputs."""
        return moment.second_moment()

    def blocks(self, factor: Tensor, index: Tensor) -> Tensor:
        """``(n, c, c)`` part of the factor on the units' side in a unit's cost, for its rows or columns ``index``."""
        raise NotImplementedError


@dataclass(frozen=True)
class KOBD(KroneckerSlicing):
    """The units stay that cost the loss most when their weights are zero, by a Kronecker-factored Fisher.

    Kron-OBD (Wang et al., arXiv:1905.05934), which LLM Surgeon (arXiv:2312.17244) calls K-OBD. Left out: several shots
    with the factors measured anew, and one threshold for all layers: shares come from ``allocation``.
    """

    name: ClassVar[str] = "kobd"

    def blocks(self, factor: Tensor, index: Tensor) -> Tensor:
        return diagonal_blocks(factor, index)


@dataclass(frozen=True)
class LLMSurgeon(KroneckerSlicing):
    """The units stay that cost the loss most after the best update of the others,
    and the output projection is so updated.

    LLM Surgeon (arXiv:2312.17244), structured, one shot: costs of removing rows and columns with the weights that stay
    updated, and the update for all that goes together. There rows and columns go by themselves. Here they are coupled:
    without a unit's column nothing reads its rows any more, and updating the rows of other units as well would make up
    for the unit twice. So only columns are updated; with its bias, where the output projection has one. Left out: 40
    shots with the factors measured anew, one threshold for all layers (shares come from ``allocation``), and LoRA
    corrections in between.
    """

    name: ClassVar[str] = "llm-surgeon"
    workspace: ClassVar[tuple[float, float]] = (2.5, 3.5)  # inverses of both sides

    def input_metric(self, output: Dense, moment: Moment) -> Tensor:
        return moment.second_moment() if output.bias is None else moment.covariance()

    def blocks(self, factor: Tensor, index: Tensor) -> Tensor:
        return schur_blocks(damped(factor, DAMPING, name=FACTOR), index)

    def work(self, view: BlockView, ranks: dict[str, int]) -> Work:
        there, found = sliceable(view), super().work(view, ranks)
        for module, rank in ranks.items():
            units = there[module]
            out, wide = units.output.weight.shape
            if rank < units.count:
                dropped = wide - rank * units.channels
                found += Work({("cholesky", dropped): 1.0, ("solve", dropped): out / dropped, ("inverse", wide): 1.0})
                found += Work({("inverse", len(units.layers[layer].weight)): 1.0 for layer, _ in units.rows})
        return found

    def takes_mean(self, output: Dense) -> bool:
        return output.bias is not None

    def lost(self, units: Sliceable, moments: BlockMoments, keep: Tensor) -> Tensor:
        gone = others(keep, units.count).nonzero()[:, 0]
        kept, dropped = (channels_of(some, units.channels) for some in (keep, gone))
        A = damped(self.input_metric(units.output, moments[units.statistic]), DAMPING, name=FACTOR)
        lost = units.output.weight.double().clone()
        lost[:, kept] -= compensated(lost.T, A, kept, dropped).T
        return lost
