"""Real-valued sparsities of modules: around a mean, within limits, and rounded to ranks.

Shape legend: L modules that get a sparsity each.
"""

import torch
from torch import Tensor

from .._utils.sizes import rounded_down
from ..errors import OptionError
from .prunable import PrunableModule


def around(average: float, deviation: Tensor, weights: Tensor) -> Tensor:
    """Return ``average`` plus ``deviation`` about its weighted mean, scaled down where a sparsity would be negative."""
    deviation = deviation - (deviation * weights).sum() / weights.sum()
    lowest = deviation.min().item()
    return average + deviation * (average / -lowest if lowest < -average else 1.0)


def capped_sparsities(phi: Tensor, weights: Tensor, average: float, caps: Tensor) -> Tensor:
    """Clip to ``caps`` and give what was cut to the others in proportion, so that the weighted mean stays ``average``.

    Raises:
        OptionError: even all caps together do not reach the average; the message says what can be reached.
    """
    total = average * weights.sum()
    most = (caps * weights).sum()
    if total > most * (1 + 1e-12):
        raise OptionError(
            f"an average sparsity of {average:g} cannot be reached with these modules and ranks; the most is "
            f"{rounded_down((most / weights.sum()).item())}. Lower the sparsity, or compress more modules if "
            "some are left out"
        )
    phi, free = phi.clone(), torch.ones_like(phi, dtype=torch.bool)
    while True:
        over = free & (phi >= caps)
        if not over.any():
            return phi.clamp_min(0)
        phi[over] = caps[over]
        free &= ~over
        fixed, rest = (phi * weights)[~free].sum(), (phi * weights)[free].sum()
        if not free.any():
            return phi.clamp_min(0)
        phi[free] = phi[free] * ((total - fixed) / rest) if rest > 0 else (total - fixed) / weights[free].sum()


def round_sparsities(units: list[PrunableModule], phi: list[float], budget: int) -> dict[tuple[int, str], int]:
    """Return integer ranks that take at most ``budget``, and less than one smallest step fewer.

    Modules with coarse steps (a head of 64 in multiples of 8) are rounded to the NEAREST rank in every block; the
    module with the finest steps relative to its size (the MLP) absorbs the difference. Rounding down everywhere and
    handing out the rest would leave some blocks a whole coarse step below others for no reason. Where the finest module
    cannot absorb it, all modules diffuse their remainders.
    """
    wanted = [(1 - share) * unit.dense for share, unit in zip(phi, units, strict=True)]
    choosable = [u for u in units if len(u.ranks) > 1] or units
    finest = min(
        dict.fromkeys(u.module for u in choosable), key=lambda m: max(_step(u) for u in choosable if u.module == m)
    )
    level = [_nearest(u.sizes, size) for u, size in zip(units, wanted, strict=True)]
    fine = [i for i, u in enumerate(units) if u.module == finest]
    rest = budget - sum(u.sizes[level[i]] for i, u in enumerate(units) if u.module != finest)
    if sum(units[i].sizes[0] for i in fine) <= rest <= sum(units[i].dense for i in fine):
        scale = rest / max(sum(wanted[i] for i in fine), 1e-9)
        for i in fine:
            wanted[i] *= scale
    else:
        fine = list(range(len(units)))
    _diffuse(units, wanted, level, fine)
    _spend(units, wanted, level, fine, budget)
    _spend(units, wanted, level, list(range(len(units))), budget)  # a short last step of a coarse module may still fit
    return {u.key: u.ranks[level[i]] for i, u in enumerate(units)}


def _step(unit: PrunableModule) -> float:
    return max((b - a for a, b in zip(unit.sizes, unit.sizes[1:], strict=False)), default=0) / unit.dense


def _nearest(sizes: tuple[int, ...], wanted: float) -> int:
    return min(range(len(sizes)), key=lambda n: (abs(sizes[n] - wanted), n))


def _diffuse(units: list[PrunableModule], wanted: list[float], level: list[int], which: list[int]) -> None:
    """Give each unit, block by block, the largest rank that its share and what its predecessors left over can pay for.

    So every module keeps its average.
    """
    carry: dict[str, float] = {}
    for i in sorted(which, key=lambda i: units[i].block):
        share = wanted[i] + carry.get(units[i].module, 0.0)
        level[i] = max((n for n, size in enumerate(units[i].sizes) if size <= share + 1e-6), default=0)
        carry[units[i].module] = share - units[i].sizes[level[i]]


def _spend(units: list[PrunableModule], wanted: list[float], level: list[int], which: list[int], budget: int) -> None:
    """Step ranks down until the budget holds, then up while a step still fits, furthest from their share first."""

    def over(i: int) -> float:
        return (units[i].sizes[level[i]] - wanted[i]) / units[i].dense

    spent = sum(u.sizes[level[i]] for i, u in enumerate(units))
    while spent > budget:
        i = max((i for i in which if level[i] > 0), key=lambda i: (over(i), units[i].block))
        spent -= units[i].sizes[level[i]] - units[i].sizes[level[i] - 1]
        level[i] -= 1
    while True:
        room = budget - spent
        fits = [i for i in which if level[i] + 1 < len(units[i].sizes) and _up(units[i], level[i]) <= room]
        if not fits:
            return
        i = min(fits, key=lambda i: (over(i), units[i].block))
        spent += _up(units[i], level[i])
        level[i] += 1


def _up(unit: PrunableModule, level: int) -> int:
    return unit.sizes[level + 1] - unit.sizes[level]
