"""The multiple-choice knapsack problem, exactly: one option of every group, so much removed, the least total cost.

Shape legend: n options of a group, S states (sets of options of the groups so far) that may be in an optimum.
"""

import sys
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Group(NamedTuple):
    """Options of which one is to be taken."""

    removed: Tensor  # (n,) int64, what each removes
    cost: Tensor  # (n,) float64, finite


def cheapest_options(groups: list[Group], remove: int) -> list[int] | None:
    r"""Find one option a group with least :math:`\sum c_i` and :math:`\sum r_i \ge` ``remove``; of equals the largest.

    For any price :math:`\lambda \ge 0` the cost of a choice is the Lagrangian bound :math:`\lambda R + \sum_i \min_o
    (c_{io} - \lambda r_{io})`, plus what its options lie above these minima, plus :math:`\lambda` times the surplus:
    all of it :math:`\ge 0`. With the price of the linear relaxation an optimum is close to the bound, so only sets of
    options less than a small gap above it are followed, group by group; the gap grows until one of them is a solution,
    which proves it optimal (Kellerer, Pferschy and Pisinger 2004, Knapsack Problems, ch. 11).

    Returns:
        Its index in every group; ``None`` where even all groups together cannot remove so much.

    Cost: about a second for 240 groups of 1,000 options with convex costs; exponential in the worst case.
    """
    if sum(int(group.removed.max()) for group in groups) < remove:
        return None
    price, reached = _price(groups, remove)
    # Of what is added up on the way to an optimum: options dearer than that are none of it, however dear.
    rounding = 1e-12 * (reached + price * remove) + sys.float_info.min
    gap = 1e-6 * price * remove / max(len(groups), 1) + rounding
    while (found := _within(groups, remove, price, gap)) is None:
        gap *= 2
    return found


def _price(groups: list[Group], remove: int) -> tuple[float, float]:
    """Return the cost of the last unit removed where options may be taken in parts, and the size of costs up to there.

    Edges of the lower convex hulls are taken cheapest first, the last one whole.
    """
    removed, reached, edges = 0, 0.0, []
    for group in groups:
        hull = _hull(group)
        removed, reached = removed + hull[0][0], reached + abs(hull[0][1])
        edges += [((d - b) / (c - a), c - a) for (a, b), (c, d) in pairwise(hull)]
    price = 0.0
    for slope, width in sorted(edges):
        if removed >= remove:
            break
        removed, reached, price = removed + width, reached + slope * width, slope
    return price, reached


def _hull(group: Group) -> list[tuple[int, float]]:
    """List ``(removed, cost)`` along the lower convex hull, from the cheapest option on."""
    hull: list[tuple[int, float]] = []
    for point in sorted(zip(group.removed.tolist(), group.cost.tolist(), strict=True), key=lambda p: (p[0], -p[1])):
        while hull and (hull[-1][1] >= point[1] or (len(hull) > 1 and not _turns_up(hull[-2], hull[-1], point))):
            hull.pop()
        hull.append(point)
    return hull


def _turns_up(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - b[0]) < (c[1] - b[1]) * (b[0] - a[0])


class _Step(NamedTuple):
    """One group of the search: for every state kept, where it came from."""

    state: Tensor  # (S,) index of the state before
    option: Tensor  # (S,)


def _within(groups: list[Group], remove: int, price: float, gap: float) -> list[int] | None:
    """Return the optimum if it is clearly less than ``gap`` above the bound: equals were followed then, too."""
    lows = [(group.cost - price * group.removed).min() for group in groups]
    options = [
        torch.nonzero(g.cost - price * g.removed - low <= gap).flatten() for g, low in zip(groups, lows, strict=True)
    ]
    rest = [(g.removed[o].min().item(), g.removed[o].max().item()) for g, o in zip(groups, options, strict=True)]
    least, most = (sum(r[k] for r in rest) for k in (0, 1))
    removed, cost = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)  # (S,)
    base, steps = 0.0, []
    for group, low, mine, ends in zip(groups, lows, options, rest, strict=True):
        least, most, base = least - ends[0], most - ends[1], base + low  # of the groups still to come; of those so far
        removed = (removed[:, None] + group.removed[mine]).flatten()  # (S n,)
        cost = (cost[:, None] + group.cost[mine]).flatten()
        above = cost - price * removed - base + price * (removed + least - remove).clamp_min(0)
        kept = _undominated(removed, cost, torch.nonzero((removed + most >= remove) & (above <= gap)).flatten())
        if not len(kept):
            return None
        removed, cost, above = removed[kept], cost[kept], above[kept]
        steps.append(_Step(kept // len(mine), mine[kept % len(mine)]))
    best = int(cost.argmin())  # of equals the first, which removes most
    return _read_back(steps, best) if above[best] <= 0.999 * gap else None


def _undominated(removed: Tensor, cost: Tensor, which: Tensor) -> Tensor:
    """Return those of the states ``which`` that no other one beats in both, most removed first."""
    which = which[torch.argsort(cost[which], stable=True)]
    which = which[torch.argsort(removed[which], descending=True, stable=True)]
    best = cost[which].cummin(0).values
    return which[torch.cat([torch.ones(min(len(which), 1), dtype=torch.bool), cost[which][1:] < best[:-1]])]


def _read_back(steps: list[_Step], state: int) -> list[int]:
    choice: list[int] = []
    for step in reversed(steps):
        choice.append(int(step.option[state]))
        state = int(step.state[state])
    return choice[::-1]
