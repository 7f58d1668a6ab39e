"""Delete rows and columns of every matrix: the residual stream itself becomes narrower (SliceGPT, arXiv:2401.15024).

The stream before every half of a block is written in the principal directions of what calibration text sends
there, and the smallest of them are deleted. Norms stand in no way: they are turned into plain RMSNorms first, which
commute with rotations. Where coordinates change, the residual branch has a matrix from the old ones to the new ones.

Embeddings, final norm and head stay as they are: the first block takes the stream into its coordinates and the last one
takes it back, which is the function that the paper computes by multiplying both matrices into embedding and head. So
tied heads stay tied, and pictures and positions may enter the stream as they do. What this costs is counted.
"""

from dataclasses import dataclass
from typing import ClassVar

from ....allocation import Allocation, Uniform, block_weights
from ....architectures import BlockView
from ...base import CompressionStep, NarrowingMethod, PrunableModule
from ...work import Work
from .shapes import Shapes
from .slicing import STREAM, check_architecture, slicing_stages, slicing_work, stream_statistics


@dataclass(frozen=True)
class SliceGPT(NarrowingMethod):
    """One width of the residual stream for all blocks, the largest with which the budget holds; shortcuts count.

    ``exclude_blocks`` and influence have no meaning here. The paper slices by a fraction of the width, which removes
    less than that fraction of the weights; here ``sparsity`` is what goes, and the fraction sliced is in the record.
    Every token counts alike, and the output of the last block is sliced as all others are. The authors' code leaves
    that whole, which loses less at one width and mostly stores more, and takes second moments of vectors of any size.
    """

    name: ClassVar[str] = "slicegpt"
    workspace: ClassVar[tuple[float, float]] = (0.0, 3.0)  # the weights of a block in fp64
    holds_dense: ClassVar[bool] = True
    all_modules: ClassVar[tuple[str, ...]] = (STREAM,)
    modes: ClassVar[tuple[str, ...]] = ("sequential",)
    allocations: ClassVar[tuple[type[Allocation], ...]] = (Uniform,)
    one_rank: ClassVar[bool] = True
    can_exclude_blocks: ClassVar[bool] = False

    def supported_modules(self, architecture, view: BlockView) -> tuple[str, ...]:
        check_architecture(self, architecture, view)
        return (STREAM,)

    def statistics(self, view: BlockView) -> set[str]:
        return stream_statistics(view)

    def prunable_modules(self, view: BlockView) -> list[PrunableModule]:
        self.supported_modules(view.architecture, view)
        width, dense, shapes = view.width, block_weights(view.module), Shapes.of(view)
        sizes = {rank: shapes.weights(rank) for rank in range(self.rank_multiple, width, self.rank_multiple)}
        fewer = {rank: size for rank, size in sizes.items() if size < dense}
        return [PrunableModule(view.index, STREAM, (*fewer, width), (*fewer.values(), dense))]

    def parameter_change(self, view: BlockView, ranks: dict[str, int]) -> tuple[int, int]:
        rank = ranks[STREAM]
        if rank == view.width:
            return 0, 0
        return Shapes.of(view).parameters(rank) - sum(p.numel() for p in view.module.parameters()), 0

    def work(self, view: BlockView, ranks: dict[str, int]) -> Work:
        return slicing_work(view, ranks[STREAM])

    def stages(self, view: BlockView, ranks: dict[str, int]) -> list[CompressionStep]:
        return slicing_stages(view, ranks[STREAM])
