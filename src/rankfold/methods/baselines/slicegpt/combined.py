"""SliceGPT and MoDeGPT in one model: they shorten different sides of the matrices (arXiv:2408.09632, App. B.8).

Shape legend: D width of the dense stream, r of the sliced one.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from ....allocation import Allocation, Budget, Influence, Parameters, Uniform, block_weights
from ....architectures import BlockView
from ....errors import OptionError, option
from ...base import CompressionStep, PrunableModule
from ...modegpt.method import MoDeGPT
from ...work import Work
from .shapes import Shapes
from .slicing import STREAM, check_architecture, slicing_stages, slicing_work, stream_statistics


@dataclass(frozen=True)
class SliceGPTMoDeGPT(MoDeGPT):
    """Options beside those of MoDeGPT, which takes what slicing leaves to do.

    Each block is compressed by MoDeGPT on what the sliced blocks before it send, and then sliced. The paper does not
    give an order.

    Attributes:
        slicing: fraction of the width of the stream that goes, in (0, 1), as the paper counts it; the width kept is
            rounded down to ``rank_multiple``. ``sparsity`` is of everything together.
    """

    name: ClassVar[str] = "slicegpt+modegpt"
    holds_dense: ClassVar[bool] = True
    targets: ClassVar[tuple[str, ...]] = ("transformers",)
    modes: ClassVar[tuple[str, ...]] = ("sequential",)
    allocations: ClassVar[tuple[type[Allocation], ...]] = (Uniform, Influence)
    budgets: ClassVar[tuple[type[Budget], ...]] = (Parameters,)
    can_exclude_blocks: ClassVar[bool] = False

    slicing: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.slicing < 1:
            raise OptionError(f"slicing must be in (0, 1), got {self.slicing}; or use {option('method', 'modegpt')}")

    def supported_modules(self, architecture, view: BlockView) -> tuple[str, ...]:
        check_architecture(self, architecture, view)
        return super().supported_modules(architecture, view)

    def statistics(self, view: BlockView) -> set[str]:
        return super().statistics(view) | stream_statistics(view)

    def prunable_modules(self, view: BlockView) -> list[PrunableModule]:
        """Those of MoDeGPT in a stream of width r, and the stream.

        The stream has the rest of the block and all that slicing saves. Sliced little, it takes more than before: its
        shortcuts do.
        """
        rank, width = self._rank(view), view.width
        inner = [
            replace(unit, sizes=tuple(size // width * rank for size in unit.sizes))
            for unit in super().prunable_modules(view)
        ]
        others = sum(unit.dense for unit in inner)
        sizes = tuple(size - others for size in (Shapes.of(view).weights(rank), block_weights(view.module)))
        return [PrunableModule(view.index, STREAM, (rank, width), sizes, fixed=True), *inner]

    def _rank(self, view: BlockView) -> int:
        return max(self.rank_multiple, int((1 - self.slicing) * view.width) // self.rank_multiple * self.rank_multiple)

    def parameter_change(self, view: BlockView, ranks: dict[str, int]) -> tuple[int, int]:
        inner = {module: rank for module, rank in ranks.items() if module != STREAM}
        plain, indices = super().parameter_change(view, inner)
        if ranks[STREAM] == view.width:
            return plain, indices
        shapes = Shapes.of(view, inner, moves_bias=self.bias_refit)
        return shapes.parameters(ranks[STREAM]) - sum(p.numel() for p in view.module.parameters()), indices

    def work(self, view: BlockView, ranks: dict[str, int]) -> Work:
        inner = {module: rank for module, rank in ranks.items() if module != STREAM}
        return super().work(view, inner) + slicing_work(view, ranks[STREAM])

    def stages(self, view: BlockView, ranks: dict[str, int]) -> list[CompressionStep]:
        inner = {module: rank for module, rank in ranks.items() if module != STREAM}
        needed = MoDeGPT.statistics(self, view)
        first = CompressionStep(needed, lambda view, moments, _: self.decompose(view, moments, inner))
        return [first, *slicing_stages(view, ranks[STREAM])]
