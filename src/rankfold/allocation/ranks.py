"""From a sparsity to integer ranks under an exact budget: of weights, or of what else the sizes of units count."""

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Protocol

from .._utils.sizes import rounded_down
from ..errors import OptionError, method_option
from .base import Allocation, Share
from .budget import Budget
from .one_rank import at, most_freed, one_rank, width_facts
from .prunable import PrunableModule, Ranks


class AllocationRequest(Protocol):
    """The options of a :class:`~rankfold.methods.Method` that ranks depend on."""

    together: ClassVar[Mapping[str, str]]

    @property
    def sparsity(self) -> float: ...

    @property
    def modules(self) -> Collection[str] | None: ...

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
    def one_rank(self) -> bool: ...


def removable(units: list[PrunableModule]) -> int:
    """Count the most weights that these modules can lose."""
    return sum(u.dense - u.sizes[0] for u in units)


def allocate(
    units: list[PrunableModule], method: AllocationRequest, counted: int, measured: Any = None
) -> tuple[Ranks, dict[str, Any]]:
    """Choose ranks such that at least ``sparsity`` of ``counted`` is removed, and less than one rank step more.

    A measured allocation also removes what it finds to cost nothing.

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
    shares = shared_budgets(units, method, counted)
    fixed = [u for u in units if u.fixed and any(share.asked for share in shares)]
    ranks = {u.key: u.ranks[-1] for u in units} | {u.key: u.ranks[0] for u in fixed}
    facts: dict[str, Any] = {"allocation": method.allocation.name}
    widths = [u for u in fixed if u.sizes[0]]  # not of experts, of which nothing is left that go
    facts |= width_facts(widths[0], widths[0].ranks[0]) if widths else {}
    for share in shares:
        own = facts.setdefault(share.module, {}) if share.module else facts
        if share.remove:
            chosen, found = _within(share, method, measured)
            ranks |= chosen
            own |= found
    return ranks, facts


def averages(units: list[PrunableModule], method: AllocationRequest, counted: int) -> dict[tuple[int, str], float]:
    """Return ``(block, module)`` -> sparsity of all modules that share its budget; of those that lose anything."""
    shares = shared_budgets(units, method, counted)
    return {u.key: share.remove / share.dense for share in shares for u in share.modules if share.remove}


def to_remove(units: list[PrunableModule], method: AllocationRequest, counted: int) -> int:
    """Count what must be removed, of all budgets together."""
    return sum(share.asked for share in shared_budgets(units, method, counted))


def check_reachable(units: list[PrunableModule], method: AllocationRequest, counted: int) -> None:
    """Raise :class:`OptionError` where no ranks remove enough, whatever the allocation; the message names the most."""
    for share in shared_budgets(units, method, counted):
        _check(share, method)


def shared_budgets(units: list[PrunableModule], method: AllocationRequest, counted: int) -> list[Share]:
    """Group the prunable modules into budgets."""
    blocks = 1 + max((u.block for u in units), default=0)
    excluded = {_block(b, blocks) for b in method.exclude_blocks}
    free = [u for u in units if u.block not in excluded and not u.fixed]
    own = method.own_sparsities

    def share(module: str | None, sparsity: float, counted: int, given: int = 0) -> Share:
        mine = [u for u in free if module in (None, u.module)]
        asked = math.ceil(sparsity * counted - 1e-9)
        return Share(
            mine,
            asked,
            counted,
            named=f"sparsity {sparsity:.6g}" + (f" of module {module}" if module else ""),
            module=module,
            given=given if asked else 0,
            stays=_last_block(mine, units),
            counts=method.budget.counts,
            together=method.together,
        )

    if not own:
        return [share(None, method.sparsity, counted, removable([u for u in units if u.fixed]))]
    return [share(name, own[name], sum(u.dense for u in units if u.module == name)) for name in own]


def _last_block(free: list[PrunableModule], units: list[PrunableModule]) -> int:
    """Size of the largest block where all could go: a model has at least one, and it may be any of them."""
    all_can_go = len(free) == len(units) and all(u.ranks[0] == 0 for u in free)
    return max((u.dense for u in free), default=0) if all_can_go else 0


def _block(index: int, blocks: int) -> int:
    if not -blocks <= index < blocks:
        raise OptionError(f"excluded block {index} is not in the model, which has blocks 0 to {blocks - 1}")
    return index % blocks


def _within(share: Share, method: AllocationRequest, measured: Any) -> tuple[Ranks, dict[str, Any]]:
    """Choose ranks that remove what the modules of a budget must lose; and facts for the record."""
    _check(share, method)
    if not method.one_rank:
        return method.allocation.allocate(share, measured)
    ranks = at(share.modules, one_rank(share.modules, share.remove))
    first = share.modules[0]
    return ranks, width_facts(first, ranks[first.key])


def _check(share: Share, method: AllocationRequest) -> None:
    units = share.modules
    alone = most_freed(units) if method.one_rank else removable(units)
    most = alone - share.stays + share.given
    if share.asked > most:
        reach = rounded_down(most / max(share.counted, 1))
        raise OptionError(
            f"{share.named} cannot be reached: the chosen modules can lose at most {most:,} of the {share.asked:,} "
            f"{share.counts} that must go, sparsity {reach}; {_how_to_reach(method)}"
        )


def _how_to_reach(method: AllocationRequest) -> str:
    """Name what lets modules lose more; only what the method has, and more modules only where some were named."""
    ways = ["lower the sparsity"]
    if method.modules is not None and not method.own_sparsities:
        ways.append("compress more modules")
    if method.target != "transformers":
        ways.append(f"leave out {method_option('target', method.target)}")
    elif getattr(method, "rank_multiple", 1) > 1:
        ways.append(f"lower {method_option('rank_multiple')}")
    *others, last = ways
    return f"{', '.join(others)}, or {last}" if others else last
