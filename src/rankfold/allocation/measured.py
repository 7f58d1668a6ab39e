"""Ranks by what they are measured to cost: the cheapest way to lose so many weights."""

from itertools import pairwise
from typing import NamedTuple

from ..errors import OptionError

__all__ = ["Cost", "cheapest", "largest_sparsity"]

Cost = dict[int, float]  # rank -> what it costs, for ranks down to some least one; 0 where the module stays dense


def largest_sparsity(average: float) -> float:
    """``1 - (1 - average)^3``: where the curves of cost end, and so the most that any one module may lose.

    Costs of modules do not add up when much is taken from one of them, and a curve is extrapolated from one measurement.
    """
    return 1 - (1 - average) ** 3


class _Step(NamedTuple):
    """An edge of a unit's convex hull, from more weights to fewer."""

    slope: float  # cost for each weight removed
    unit: int
    levels: tuple[int, ...]  # indices into the unit's ranks it goes down by, the last one its end


def cheapest(units, costs: dict[tuple[int, str], Cost], remove: int) -> dict[tuple[int, str], int]:
    """Ranks that remove at least ``remove`` weights at the least total cost, up to less than one rank step.

    On the lower convex hull of every curve the cheapest edges are taken first, which is optimal for a sum of convex curves; of
    the last edge as much as is needed.

    Args:
        units: the :class:`~rankfold.methods.Unit` of all blocks.
        costs: ``(block, module)`` -> cost of each rank; ranks without a cost are not taken.
        remove: weights.

    Raises:
        OptionError: the ranks with a cost cannot remove so many.
    """
    levels = [len(unit.ranks) - 1 for unit in units]
    edges = [edge for i, unit in enumerate(units) for edge in _hull(i, unit, costs[unit.block, unit.module])]
    removed = 0
    for edge in sorted(edges, key=lambda e: (e.slope, e.unit)):  # within a unit slopes ascend: its edges stay in order
        unit = units[edge.unit]
        for level in edge.levels:
            if removed >= remove:
                break
            removed += unit.sizes[levels[edge.unit]] - unit.sizes[level]
            levels[edge.unit] = level
    if removed < remove:
        raise OptionError(
            f"the ranks whose cost was measured can lose {removed:,} of the {remove:,} weights that must go; lower the "
            "sparsity, compress more modules, lower --multiple, or use --allocation uniform"
        )
    _return_surplus(units, costs, levels, removed - remove)
    return {(u.block, u.module): u.ranks[level] for u, level in zip(units, levels, strict=True)}


def _hull(index: int, unit, cost: Cost) -> list[_Step]:
    """Edges of the lower convex hull of a unit's cost over removed weights, cheapest first."""
    points = [n for n in range(len(unit.ranks) - 1, -1, -1) if unit.ranks[n] in cost]  # dense first
    hull: list[int] = []
    for n in points:
        while len(hull) > 1 and _slope(unit, cost, hull[-1], n) <= _slope(unit, cost, hull[-2], hull[-1]):
            hull.pop()
        hull.append(n)
    return [_Step(_slope(unit, cost, a, b), index, tuple(n for n in points if b <= n < a)) for a, b in pairwise(hull)]


def _slope(unit, cost: Cost, a: int, b: int) -> float:
    return (cost[unit.ranks[b]] - cost[unit.ranks[a]]) / (unit.sizes[a] - unit.sizes[b])


def _return_surplus(units, costs, levels: list[int], surplus: int) -> None:
    """Step ranks up again where that still fits, dearest weights first: the last step down may have been a coarse one."""
    while True:
        ups = [(_gain(units[i], costs, level), i) for i, level in enumerate(levels) if _fits(units[i], level, surplus)]
        if not ups:
            return
        _, i = max(ups)
        surplus -= units[i].sizes[levels[i] + 1] - units[i].sizes[levels[i]]
        levels[i] += 1


def _fits(unit, level: int, surplus: int) -> bool:
    return level + 1 < len(unit.sizes) and unit.sizes[level + 1] - unit.sizes[level] <= surplus


def _gain(unit, costs, level: int) -> float:
    return _slope(unit, costs[unit.block, unit.module], level + 1, level)
