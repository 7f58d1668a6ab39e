"""Ranks by what they are measured to cost: the cheapest way to lose so much."""

from collections.abc import Mapping
from itertools import product
from types import MappingProxyType

import torch

from ..errors import OptionError, method_option
from .knapsack import Group, cheapest_options
from .prunable import PrunableModule, RankCosts, Ranks


def largest_sparsity(average: float) -> float:
    """Return ``1 - (1 - average)^3``: where the curves of cost end, and so the most that any one module may lose.

    Costs of modules do not add up when much is taken from one, and a curve is extrapolated from one measurement.
    """
    return 1 - (1 - average) ** 3


def cheapest(
    units: list[PrunableModule],
    costs: RankCosts,
    remove: int,
    what: str = "weights",
    together: Mapping[str, str] = MappingProxyType({}),
) -> Ranks:
    """Return the ranks that remove at least ``remove`` at the least total cost, exactly.

    Of equals it takes those that remove most. So a smaller budget never costs less, and never leaves more: what solves
    it is allowed under a larger one too.

    Args:
        units: of all blocks.
        costs: ``(block, module)`` -> cost of each rank; ranks without a cost are not taken.
        remove: in what the units' sizes count.
        what: that is, for messages.
        together: module -> another one of the block that has rank 0 where it has, and nowhere else.

    Raises:
        OptionError: the ranks with a cost cannot remove so much.
    """
    bound: dict[tuple[int, str], list[PrunableModule]] = {}
    for unit in units:
        bound.setdefault((unit.block, together.get(unit.module, unit.module)), []).append(unit)
    options = [_options(some, costs) for some in bound.values()]
    groups = [_group(some, ranks, costs) for some, ranks in zip(bound.values(), options, strict=True)]
    choice = cheapest_options(groups, remove)
    if choice is None:
        most = sum(int(group.removed.max()) for group in groups)
        raise OptionError(
            f"the ranks whose cost was measured can lose {most:,} of the {remove:,} {what} that must go; lower the "
            f"sparsity, compress more modules if some are left out, lower {method_option('rank_multiple')}, "
            f"or use {method_option('allocation', 'uniform')}"
        )
    found: Ranks = {}
    for some, ranks, n in zip(bound.values(), options, choice, strict=True):
        found |= zip([unit.key for unit in some], ranks[n], strict=True)
    return found


def _options(units: list[PrunableModule], costs: RankCosts) -> list[tuple[int, ...]]:
    """List the ranks that these units may have together."""
    ranks = product(*([rank for rank in u.ranks if rank in costs[u.key]] for u in units))
    return [some for some in ranks if all(some) or not any(some)]


def _group(units: list[PrunableModule], options: list[tuple[int, ...]], costs: RankCosts) -> Group:
    removed = [sum(u.dense - u.size(rank) for u, rank in zip(units, ranks, strict=True)) for ranks in options]
    cost = [sum(costs[u.key][rank] for u, rank in zip(units, ranks, strict=True)) for ranks in options]
    return Group(torch.tensor(removed, dtype=torch.int64), torch.tensor(cost, dtype=torch.float64))
