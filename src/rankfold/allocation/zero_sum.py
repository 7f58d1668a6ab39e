"""Singular values go one by one, so that what is expected of the loss stays near zero: ZS-SVD (arXiv:2602.02848)."""

import heapq
from dataclasses import dataclass
from typing import Any, ClassVar

from .base import Allocation, DenseModelMeasures, Share
from .prunable import PrunableModule, Ranks

Queues = dict[bool, list[tuple[float, int]]]  # whether the loss rises -> size of the change, and place of the module


@dataclass(frozen=True)
class ZeroSum(Allocation):
    """Remove the singular value that changes the loss least, of the sign that brings the sum of changes back to zero.

    Only the smallest singular value left of each matrix can go next. A matrix saves nothing until its factors hold
    fewer numbers than it does; the values removed until then count in the sum all the same.
    """

    name: ClassVar[str] = "zero-sum"

    def measure(self, dense: DenseModelMeasures) -> Any:
        return dense.singular_value_effects()

    def allocate(self, share: Share, measured: Any) -> tuple[Ranks, dict[str, Any]]:
        left = {module.key: module.ranks[-1] for module in share.modules}  # singular values of each
        queues: Queues = {True: [], False: []}
        for place, module in enumerate(share.modules):
            _push(queues, place, module, left, measured)
        removed, total = 0, 0.0
        while removed < share.remove:
            rises = total <= 0
            _, place = heapq.heappop(queues[rises] or queues[not rises])
            module = share.modules[place]
            change = measured[module.key][left[module.key] - 1]
            before, left[module.key] = _kept(module, left[module.key]), left[module.key] - 1
            removed += before - _kept(module, left[module.key])
            total += change
            _push(queues, place, module, left, measured)
        ranks = {module.key: _rank(module, left[module.key]) for module in share.modules}
        return ranks, {"expected_loss_change": total}


def _push(queues: Queues, place: int, module: PrunableModule, left: Ranks, measured: Any) -> None:
    if left[module.key] > module.ranks[0]:
        change = measured[module.key][left[module.key] - 1]
        heapq.heappush(queues[change >= 0], (abs(change), place))


def _rank(module: PrunableModule, left: int) -> int:
    """Return the smallest rank the module may take that holds so many singular values."""
    return next(rank for rank in module.ranks if rank >= left)


def _kept(module: PrunableModule, left: int) -> int:
    return module.size(_rank(module, left))
