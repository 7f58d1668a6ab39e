"""Ranks by what they are measured to cost: the cheapest way to lose so much."""

import torch

from ..errors import OptionError
from .knapsack import Group, cheapest_options

__all__ = ["Cost", "cheapest", "largest_sparsity"]

Cost = dict[int, float]  # rank -> what it costs, for ranks down to some least one; 0 where the module stays dense


def largest_sparsity(average: float) -> float:
    """``1 - (1 - average)^3``: where the curves of cost end, and so the most that any one module may lose.

    Costs of modules do not add up when much is taken from one of them, and a curve is extrapolated from one measurement.
    """
    return 1 - (1 - average) ** 3


def cheapest(
    units, costs: dict[tuple[int, str], Cost], remove: int, what: str = "weights"
) -> dict[tuple[int, str], int]:
    """Ranks that remove at least ``remove`` at the least total cost, exactly; of equals those that remove most.

    So a smaller budget never costs less, and never leaves more: what solves it is allowed under a larger one too.

    Args:
        units: the :class:`~rankfold.methods.Unit` of all blocks.
        costs: ``(block, module)`` -> cost of each rank; ranks without a cost are not taken.
        remove: in what the units' sizes count.
        what: that is, for messages.

    Raises:
        OptionError: the ranks with a cost cannot remove so much.
    """
    allowed = [[rank for rank in u.ranks if rank in costs[u.block, u.module]] for u in units]
    groups = [_group(unit, ranks, costs[unit.block, unit.module]) for unit, ranks in zip(units, allowed, strict=True)]
    choice = cheapest_options(groups, remove)
    if choice is None:
        most = sum(int(group.removed.max()) for group in groups)
        raise OptionError(
            f"the ranks whose cost was measured can lose {most:,} of the {remove:,} {what} that must go; lower the sparsity, "
            "compress more modules, lower --multiple, or use --allocation uniform"
        )
    return {(u.block, u.module): ranks[n] for u, ranks, n in zip(units, allowed, choice, strict=True)}


def _group(unit, ranks: list[int], cost: Cost) -> Group:
    removed = torch.tensor([unit.dense - unit.size(rank) for rank in ranks], dtype=torch.int64)
    return Group(removed, torch.tensor([cost[rank] for rank in ranks], dtype=torch.float64))
