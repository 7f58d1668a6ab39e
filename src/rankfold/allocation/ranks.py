"""From a sparsity to integer ranks under an exact budget: of weights, or of what else the sizes of units count."""

import math
from typing import NamedTuple

import torch

from ..errors import OptionError, method_option
from .by_block import BY_BLOCK, by_block
from .counting import COUNTS
from .influence import capped_sparsities, epsilon_for, softmax_sparsities
from .measured import cheapest
from .one_rank import common_ranks, freed, one_rank, width_facts

__all__ = ["allocate", "averages", "budgets", "check_reachable", "removable", "to_remove"]

# Allocations that take the cheapest ranks -> what their costs are called in the record.
BY_COST = {"measured": "divergence", "least-influence": "influence", "greedy": "removed_as_number"}
MLP_MODULES = ("mlp", "experts", "gate", "up", "down")  # the rest belong to the attention half of a block


def removable(units) -> int:
    """The most weights these units can lose."""
    return sum(u.dense - u.sizes[0] for u in units)


def allocate(units, method, counted: int, scores=None) -> tuple[dict[tuple[int, str], int], dict]:
    """Ranks for all units such that at least ``sparsity`` of ``counted`` goes, and less than one rank step more, but
    for what a measured allocation finds to cost nothing.

    Args:
        units: the :class:`~rankfold.methods.Unit` of all blocks.
        method: sparsity, allocation, protected blocks (see :class:`~rankfold.methods.Method`).
        counted: what the sparsity is a fraction of, counted as the sizes of the units are.
        scores: block -> (block, attention, mlp) influence, for the influence allocations; block -> number, for those of
            :data:`BY_BLOCK`; (block, module) -> rank -> cost, for those of :data:`BY_COST`.

    Returns:
        ``(ranks by (block, module), facts for the record)``.

    Raises:
        OptionError: the sparsity cannot be reached; the message says what can.
    """
    ranks = {(u.block, u.module): u.ranks[-1] for u in units}
    facts: dict = {"allocation": method.allocation}
    found = budgets(units, method, counted)
    fixed = [u for u in units if u.fixed and any(budget.asked for budget in found)]
    ranks |= {(u.block, u.module): u.ranks[0] for u in fixed}
    facts |= width_facts(fixed[0], fixed[0].ranks[0]) if fixed else {}
    for budget in found:
        own = facts.setdefault(budget.module, {}) if budget.module else facts
        ranks |= _within(budget, method, scores, own)
    return ranks, facts


def averages(units, method, counted: int) -> dict[tuple[int, str], float]:
    """``(block, module)`` -> sparsity of all the units that share its budget; of those that lose anything."""
    return {
        (u.block, u.module): budget.remove / budget.dense
        for budget in budgets(units, method, counted)
        for u in budget.units
        if budget.remove
    }


def to_remove(units, method, counted: int) -> int:
    """What must go, of all budgets together."""
    return sum(budget.asked for budget in budgets(units, method, counted))


def check_reachable(units, method, counted: int) -> None:
    """Raise :class:`OptionError` where no ranks remove enough, whatever the allocation; the message says what can be."""
    for budget in budgets(units, method, counted):
        _check(budget, method)


class Budget(NamedTuple):
    """Units that lose so much together."""

    units: list
    asked: int  # what must go
    what: str  # for messages
    counted: int  # that the sparsity is a fraction of
    stays: int  # what could go, but not with all the others
    module: str | None = None  # where a module has its own sparsity
    given: int = 0  # what goes of other units, whose ranks are fixed

    @property
    def remove(self) -> int:
        """What must go of these units."""
        return max(0, self.asked - self.given)

    @property
    def dense(self) -> int:
        return sum(u.dense for u in self.units)


def budgets(units, method, counted: int) -> list[Budget]:
    """Which units lose how much together."""
    blocks = 1 + max((u.block for u in units), default=0)
    protected = {_block(b, blocks) for b in method.protect}
    free = [u for u in units if u.block not in protected and not u.fixed]
    if not method.own_sparsities:
        asked, stays = math.ceil(method.sparsity * counted - 1e-9), _last_block(free, units)
        given = sum(u.dense - u.sizes[0] for u in units if u.fixed) if asked else 0
        return [Budget(free, asked, f"sparsity {method.sparsity}", counted, stays, given=given)]
    found = []
    for module, sparsity in method.own_sparsities.items():
        here = sum(u.dense for u in units if u.module == module)
        mine, asked = [u for u in free if u.module == module], math.ceil(sparsity * here - 1e-9)
        stays = _last_block(mine, units)
        found.append(Budget(mine, asked, f"sparsity {sparsity} of module {module}", here, stays, module))
    return found


def _last_block(free, units) -> int:
    """Size of the largest block where all could go: a model has at least one, and it may be any of them."""
    all_can_go = len(free) == len(units) and all(u.ranks[0] == 0 for u in free)
    return max((u.dense for u in free), default=0) if all_can_go else 0


def _block(index: int, blocks: int) -> int:
    if not -blocks <= index < blocks:
        raise OptionError(f"protected block {index} is not in the model, which has blocks 0 to {blocks - 1}")
    return index % blocks


def _within(budget: Budget, method, scores, facts: dict) -> dict:
    """Ranks of a budget's units that remove what it must."""
    units, remove = budget.units, budget.remove
    if remove == 0:
        return {(u.block, u.module): u.ranks[-1] for u in units}
    _check(budget, method)
    if method.one_rank:
        rank = one_rank(units, remove)
        facts |= width_facts(units[0], rank)
        return {(u.block, u.module): rank for u in units}
    if method.allocation in BY_COST:
        return _by_cost(units, scores, remove, method, facts)
    phi = _sparsities(units, method, remove / budget.dense, scores, facts)
    return _round(units, phi, budget.dense - remove)


def _check(budget: Budget, method) -> None:
    units = budget.units
    alone = freed(units, min(common_ranks(units))) if method.one_rank else removable(units)
    most = alone - budget.stays + budget.given
    if budget.asked > most:
        reach = most / max(budget.counted, 1)
        finer = f"lower {method_option('multiple')}"
        if method.target != "transformers":
            finer = f"leave out {method_option('target', method.target)}"
        raise OptionError(
            f"{budget.what} cannot be reached: the chosen modules can lose at most {most:,} of the {budget.asked:,} "
            f"{COUNTS[method.budget]} that must go, sparsity {reach:.4f}; lower the sparsity, compress more modules, or "
            f"{finer}"
        )


def _by_cost(units, costs, remove: int, method, facts: dict) -> dict:
    ranks = cheapest(units, costs, remove, COUNTS[method.budget], method.together)
    chosen = ranks if method.allocation == "measured" else {key: rank for key, rank in ranks.items() if rank == 0}
    facts[BY_COST[method.allocation]] = {
        f"{block}.{module}": costs[block, module][rank] for (block, module), rank in chosen.items()
    }
    return ranks


def _sparsities(units, method, average: float, scores, facts: dict) -> list[float]:
    """Real-valued sparsity of every unit, weighted mean ``average``."""
    weights = torch.tensor([u.dense for u in units], dtype=torch.float64)
    caps = torch.tensor([1 - u.sizes[0] / u.dense for u in units], dtype=torch.float64)
    phi = torch.full_like(weights, average)
    if method.allocation != "uniform" and scores is None:
        raise OptionError(f"allocation {method.allocation!r} needs scores of the dense model, and there are none")
    if method.allocation in BY_BLOCK:
        facts[BY_BLOCK[method.allocation]] = {str(block): score for block, score in scores.items()}
        mine = torch.tensor([scores[u.block] for u in units], dtype=torch.float64)
        phi = by_block(method, mine, weights, average)
    elif method.allocation != "uniform":
        s = torch.tensor([_score(u, method.allocation, scores) for u in units], dtype=torch.float64)
        if method.allocation == "influence-modules":
            s = s * _shares(units)
        epsilon = method.epsilon or epsilon_for(s, weights, average)
        facts |= {
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "scores": {str(b): v for b, v in scores.items()},
        }
        phi = softmax_sparsities(s, weights, average, epsilon)
    return capped_sparsities(phi, weights, average, caps).tolist()


def _score(unit, allocation: str, scores) -> float:
    block, attention, mlp = scores[unit.block]
    if allocation == "influence":
        return block
    return mlp if unit.module in MLP_MODULES else attention


def _shares(units) -> torch.Tensor:
    """Weight of a unit's half of the block, with mean 3/2 over the two halves: the paper's w_mlp = 2, w_mha = 1 (Eq. 42)
    where the MLP holds two thirds of the parameters, and the true shares elsewhere."""
    halves: dict[tuple[int, bool], int] = {}
    for u in units:
        key = (u.block, u.module in MLP_MODULES)
        halves[key] = halves.get(key, 0) + u.dense
    share = [
        3 * halves[u.block, u.module in MLP_MODULES] / sum(halves.get((u.block, h), 0) for h in (0, 1)) for u in units
    ]
    return torch.tensor(share, dtype=torch.float64)


def _round(units, phi: list[float], budget: int) -> dict[tuple[int, str], int]:
    """Integer ranks that take at most ``budget``, and less than one smallest step fewer.

    Modules with coarse steps (a head of 64 in multiples of 8) are rounded to the NEAREST rank in every block; the module
    with the finest steps relative to its size (the MLP) absorbs the difference. Rounding down everywhere and handing out
    the rest would leave some blocks a whole coarse step below others for no reason. Where the finest module cannot absorb
    it, all modules diffuse their remainders.
    """
    wanted = [(1 - share) * unit.dense for share, unit in zip(phi, units, strict=True)]
    finest = min(dict.fromkeys(u.module for u in units), key=lambda m: max(_step(u) for u in units if u.module == m))
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
    return {(u.block, u.module): u.ranks[level[i]] for i, u in enumerate(units)}


def _step(unit) -> float:
    return max((b - a for a, b in zip(unit.sizes, unit.sizes[1:], strict=False)), default=0) / unit.dense


def _nearest(sizes, wanted: float) -> int:
    return min(range(len(sizes)), key=lambda n: (abs(sizes[n] - wanted), n))


def _diffuse(units, wanted: list[float], level: list[int], which: list[int]) -> None:
    """Along the blocks, per module, each unit takes the largest rank that its own share plus what its predecessors left
    over can pay for, so that every module keeps its average."""
    carry: dict[str, float] = {}
    for i in sorted(which, key=lambda i: units[i].block):
        share = wanted[i] + carry.get(units[i].module, 0.0)
        level[i] = max((n for n, size in enumerate(units[i].sizes) if size <= share + 1e-6), default=0)
        carry[units[i].module] = share - units[i].sizes[level[i]]


def _spend(units, wanted: list[float], level: list[int], which: list[int], budget: int) -> None:
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


def _up(unit, level: int) -> int:
    return unit.sizes[level + 1] - unit.sizes[level]
