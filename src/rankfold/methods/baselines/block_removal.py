"""Whole blocks that go: what is left is a stock model with fewer blocks."""

from dataclasses import dataclass, field
from typing import ClassVar

from ...allocation import Allocation, Budget, Bytes, Greedy, LeastInfluence, Parameters, block_weights
from ...architectures import BlockView
from ...calibration.moments import Moment
from ...linalg.psd import relative
from ..base import BlockResult, Method, PrunableModule

BLOCK = "block"  # the module whose rank is 1 where a block stays and 0 where it goes


@dataclass(frozen=True)
class BlockRemoval(Method):
    """Remove blocks; which ones is a matter of the allocation.

    At least one block stays.
    """

    all_modules: ClassVar[tuple[str, ...]] = (BLOCK,)
    workspace: ClassVar[tuple[float, float]] = (0.0, 0.0)
    budgets: ClassVar[tuple[type[Budget], ...]] = (Parameters, Bytes)

    def supported_modules(self, architecture, view: BlockView) -> tuple[str, ...]:
        return (BLOCK,)

    def statistics(self, view: BlockView) -> set[str]:
        return {"change"}

    def prunable_modules(self, view: BlockView) -> list[PrunableModule]:
        return [PrunableModule(view.index, BLOCK, (0, 1), (0, block_weights(view.module)))]

    def parameter_change(self, view: BlockView, ranks: dict[str, int]) -> tuple[int, int]:
        return (0 if ranks[BLOCK] else -sum(p.numel() for p in view.module.parameters())), 0

    def cached_numbers(self, view: BlockView, ranks: dict[str, int]) -> int:
        return ranks[BLOCK] * view.attention.cached

    def decompose(self, view: BlockView, moments, ranks: dict[str, int]) -> BlockResult:
        stays = ranks[BLOCK] == 1
        error = 0.0 if stays else change_error(moments["change"])
        errors = {} if stays else {BLOCK: lambda other: change_error(other["change"])}
        return BlockResult(reports={BLOCK: {"rank": ranks[BLOCK], "of": 1, "relative_error": error}}, errors=errors)


def change_error(moment: Moment) -> float:
    """RMS of what the block adds to its input over the RMS of its output."""
    return relative(*moment.mean.tolist())


@dataclass(frozen=True)
class ShortGPT(BlockRemoval):
    """Remove the blocks that turn the residual stream least: ShortGPT (arXiv:2403.03853).

    Block influence, one minus the mean cosine between input and output, is measured once, on the dense model.
    """

    name: ClassVar[str] = "shortgpt"
    allocations: ClassVar[tuple[type[Allocation], ...]] = (LeastInfluence,)

    allocation: Allocation = field(default=LeastInfluence())


@dataclass(frozen=True)
class SLEB(BlockRemoval):
    """Remove one block after another, each time the one without which the calibration text is predicted best.

    SLEB (arXiv:2402.09025), with its third metric: the loss is measured on the model as the removals before have left
    it. It takes about half a forward over all calibration samples for every block, for every block removed. The
    authors' code never removes the first and the last block: ``exclude_blocks=(0, -1)``.
    """

    name: ClassVar[str] = "sleb"
    allocations: ClassVar[tuple[type[Allocation], ...]] = (Greedy,)

    allocation: Allocation = field(default=Greedy())
