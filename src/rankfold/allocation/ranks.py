"""From a sparsity to integer ranks under an exact budget: of weights, or of what else the sizes of units count."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from ..errors import OptionError, method_option
from .base import Allocation, Share
from .budget import Budget
from .one_rank import common_ranks, freed, one_rank, width_facts
from .prunable import PrunableModule, Ranks

__all__ = ["allocate", "averages", "check_reachable", "removable", "shared_budgets", "to_remove"]


class AllocationRequest(Protocol):
    """The options of a :class:`~rankfold.methods.Method` that ranks depend on."""

    @property
    def sparsity(self) -> float: ...

    @property
    def own_sparsities(self) -> Mapping[str, float] | None: ...

    @property
    def allocation(self) -> Allocation: ...

    @property
    def budget(self) -> Budget: ...

    @property
    def exclude_blocks(self) -> tuple[int, ...]: ...

    @property
    def target(self) -> str: ...

    @property
    def together(self) -> Mapping[str, str]: ...

    @property
    def one_rank(self) -> bool: ...


def removable(units: list[PrunableModule]) -> int:
    """Count the most weights that these modules can lose."""
    return sum(u.dense - u.sizes[0] for u in units)


def allocate(
    units: list[PrunableModule], method: AllocationRequest, counted: int, measured: Any = None
) -> tuple[Ranks, dict[str, Any]]:
    """Choose ranks such that at least ``sparsity`` of ``counted`` is removed, and less than one rank step more, but for what
    a measured allocation finds to cost nothing.

    Args:
        units: of all blocks.
        method: the options.
        counted: what the sparsity is a fraction of, counted as the sizes of the units are.
        measured: what the allocation measured on the dense model.

    Returns:
        ``(ranks by (block, module), facts for the record)``.

    Raises:
        OptionError: the sparsity cannot be reached; the message says what can.
    """
    ranks = {(u.block, u.module): u.ranks[-1] for u in units}
    facts: dict[str, Any] = {"allocation": method.allocation.name}
    found = shared_budgets(units, method, counted)
    fixed = [u for u in units if u.fixed and any(budget.asked for budget in found)]
    ranks |= {(u.block, u.module): u.ranks[0] for u in fixed}
    facts |= width_facts(fixed[0], fixed[0].ranks[0]) if fixed else {}
    for budget in found:
        own = facts.setdefault(budget.module, {}) if budget.module else facts
        ranks |= _within(budget, method, measured, own)
    return ranks, facts


def averages(units: list[PrunableModule], method: AllocationRequest, counted: int) -> dict[tuple[int, str], float]:
    """Return ``(block, module)`` -> sparsity of all modules that share its budget; of those that lose anything."""
    return {
        (u.block, u.module): budget.remove / budget.dense
        for budget in shared_budgets(units, method, counted)
        for u in budget.units
        if budget.remove
    }


def to_remove(units: list[PrunableModule], method: AllocationRequest, counted: int) -> int:
    """Count what must be removed, of all budgets together."""
    return sum(budget.asked for budget in shared_budgets(units, method, counted))


def check_reachable(units: list[PrunableModule], method: AllocationRequest, counted: int) -> None:
    """Raise :class:`OptionError` where no ranks remove enough, whatever the allocation; the message says what can be."""
    for budget in shared_budgets(units, method, counted):
        _check(budget, method)


class SharedBudget(NamedTuple):
    """Modules that lose so much together."""

    units: list[PrunableModule]
    asked: int  # what must go
    what: str  # for messages
    counted: int  # that the sparsity is a fraction of
    stays: int  # what could go, but not with all the others
    module: str | None = None  # where a module has its own sparsity
    given: int = 0  # what goes of other units, whose ranks are fixed

    @property
    def remove(self) -> int:
        """Count what must be removed of these modules."""
        return max(0, self.asked - self.given)

    @property
    def dense(self) -> int:
        return sum(u.dense for u in self.units)


def shared_budgets(units: list[PrunableModule], method: AllocationRequest, counted: int) -> list[SharedBudget]:
    """Group the prunable modules into budgets."""
    blocks = 1 + max((u.block for u in units), default=0)
    excluded = {_block(b, blocks) for b in method.exclude_blocks}
    free = [u for u in units if u.block not in excluded and not u.fixed]
    if not method.own_sparsities:
        asked, stays = math.ceil(method.sparsity * counted - 1e-9), _last_block(free, units)
        given = sum(u.dense - u.sizes[0] for u in units if u.fixed) if asked else 0
        return [SharedBudget(free, asked, f"sparsity {method.sparsity}", counted, stays, given=given)]
    found: list[SharedBudget] = []
    for module, sparsity in method.own_sparsities.items():
        here = sum(u.dense for u in units if u.module == module)
        mine, asked = [u for u in free if u.module == module], math.ceil(sparsity * here - 1e-9)
        stays = _last_block(mine, units)
        found.append(SharedBudget(mine, asked, f"sparsity {sparsity} of module {module}", here, stays, module))
    return found


def _last_block(free: list[PrunableModule], units: list[PrunableModule]) -> int:
    """Size of the largest block where all could go: a model has at least one, and it may be any of them."""
    all_can_go = len(free) == len(units) and all(u.ranks[0] == 0 for u in free)
    return max((u.dense for u in free), default=0) if all_can_go else 0


def _block(index: int, blocks: int) -> int:
    if not -blocks <= index < blocks:
        raise OptionError(f"excluded block {index} is not in the model, which has blocks 0 to {blocks - 1}")
    return index % blocks


def _within(budget: SharedBudget, method: AllocationRequest, measured: Any, facts: dict[str, Any]) -> Ranks:
    """Choose the ranks of a budget's modules that remove what it must."""
    units, remove = budget.units, budget.remove
    if remove == 0:
        return {(u.block, u.module): u.ranks[-1] for u in units}
    _check(budget, method)
    if method.one_rank:
        rank = one_rank(units, remove)
        facts |= width_facts(units[0], rank)
        return {(u.block, u.module): rank for u in units}
    share = Share(units, remove, method.budget.counts, method.together)
    ranks, own = method.allocation.allocate(share, measured)
    facts |= own
    return ranks


def _check(budget: SharedBudget, method: AllocationRequest) -> None:
    units = budget.units
    alone = freed(units, min(common_ranks(units))) if method.one_rank else removable(units)
    most = alone - budget.stays + budget.given
    if budget.asked > most:
        reach = most / max(budget.counted, 1)
        finer = f"lower {method_option('rank_multiple')}"
        if method.target != "transformers":
            finer = f"leave out {method_option('target', method.target)}"
        raise OptionError(
            f"{budget.what} cannot be reached: the chosen modules can lose at most {most:,} of the {budget.asked:,} "
            f"{method.budget.counts} that must go, sparsity {reach:.4f}; lower the sparsity, compress more modules, or "
            f"{finer}"
        )
