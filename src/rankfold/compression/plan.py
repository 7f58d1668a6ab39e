"""Ranks under the budget, and everything that can be said before a weight changes."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from ..allocation import (
    Greedy,
    Measured,
    Uniform,
    allocate,
    averages,
    check_reachable,
    shared_budgets,
    tensor_bytes,
    to_remove,
    unique_parameters,
)
from ..allocation.one_rank import common_ranks, freed
from ..architectures import BlockView
from ..calibration.backward import sweep_memory, windows_for
from ..calibration.experts import INPUT, PER_UNIT, ROUTING
from ..calibration.gradients import numbers, widest
from ..calibration.statistics import SAMPLE_ROWS, STATISTICS
from ..data.calibration_data import mean_length
from ..data.probes import most_tokens
from ..errors import OptionError, UnsupportedModelError
from ..methods import BLOCK, Method, PrunableModule
from ..models.dense_model import DenseModel
from ..report.plan import ModulePlan, Plan
from .budget import RankOptions, rank_options

__all__ = [
    "allocate_ranks",
    "budget",
    "build_plan",
    "check",
    "divergence_for_stock",
    "kept_blocks",
    "of_block",
    "shares",
]

ROUNDING = 0.01  # of what is counted: more than this beyond what was asked for is worth a line


class Allocated(NamedTuple):
    """What :func:`allocate_ranks` decided."""

    ranks: dict[tuple[int, str], int]  # (block, module) -> rank
    facts: dict  # of the allocation, for the record
    options: RankOptions  # what there was to choose from
    budget: dict  # what it counts, how much there is of it, how much was to go and goes


def allocate_ranks(options: RankOptions, method: Method, measured=None) -> Allocated:
    """Ranks under the budget; see :func:`rankfold.allocation.allocate`."""
    units, counted = options.priced, options.counted
    ranks, facts = allocate(units, method, counted, measured)
    removed = sum(u.dense - u.size(ranks[u.block, u.module]) for u in units)
    amounts = {"counted": counted, "asked": to_remove(units, method, counted), "removed": removed}
    amounts["excess"] = _excess(units, ranks, method, amounts)
    return Allocated(ranks, facts, options, {**options.facts, **amounts})


def divergence_for_stock(source: DenseModel, method: Method, costs) -> float | None:
    """Return the expected divergence of the predictions, in nats per token, with the ranks that ``target="stock"`` chooses.

    Args:
        costs: of a measured allocation, (block, module) -> rank -> nats per token.

    Returns:
        ``None`` where there are no such ranks, or one whose cost is not known.
    """
    if not isinstance(method.allocation, Measured) or "stock" not in method.targets or method.budget.is_timed:
        return None
    try:
        stock = replace(method, target="stock", allocation=Uniform(), exclude_blocks=())
        ranks = allocate_ranks(rank_options(source, stock), stock).ranks
    except (OptionError, UnsupportedModelError):
        return None
    found = [costs.get(key, {}).get(rank) for key, rank in ranks.items()]
    return None if None in found else sum(found)


def _excess(units: list[PrunableModule], ranks: dict, method: Method, amounts: dict) -> str | None:
    """Say why more goes than was asked for, where it is more than the rounding of ranks explains."""
    counted, asked, removed = (amounts[name] for name in ("counted", "asked", "removed"))
    if removed - asked <= ROUNDING * counted:
        return None
    smaller = [unit for unit in units if ranks[unit.block, unit.module] < unit.ranks[-1]]
    if any(unit.module == BLOCK for unit in smaller):
        least = min(unit.dense for unit in smaller if unit.module == BLOCK)
        reason = f"whole blocks go, and the smallest of these is {least / counted:.1%}"
    elif method.one_rank:
        free = [unit for unit in units if not unit.fixed]
        width = ranks[free[0].block, free[0].module]
        less = freed(free, min(rank for rank in common_ranks(free) if rank > width))
        reason = f"all blocks have one width, and the next larger one removes {max(0, less) / counted:.1%}"
    elif method.allocation.may_exceed:
        reason = "what was measured to cost nothing goes too"
    else:
        levels = [(unit, unit.ranks.index(ranks[unit.block, unit.module])) for unit in smaller]
        step = min(unit.sizes[level + 1] - unit.sizes[level] for unit, level in levels)
        reason = f"the smallest step between two ranks is {step / counted:.1%}"
    return f"{asked / counted:.1%} was asked for and {removed / counted:.1%} goes: {reason}"


def check(options: RankOptions, method: Method) -> None:
    """Raise :class:`OptionError` where the sparsity cannot be reached, whatever is measured."""
    check_reachable(options.priced, method, options.counted)


def budget(options: RankOptions, method: Method) -> tuple[list[PrunableModule], int]:
    """Units that may lose something together, and how much must go, for methods with one kind of unit."""
    (only,) = shared_budgets(options.priced, method, options.counted)
    return only.units, only.remove


def kept_blocks(ranks: dict[tuple[int, str], int], blocks: int) -> tuple[int, ...]:
    """Which of the dense model's blocks are in the result, ascending."""
    return tuple(block for block in range(blocks) if ranks.get((block, BLOCK)) != 0)


def shares(options: RankOptions, method: Method) -> tuple[list[PrunableModule], dict]:
    """Units of all blocks, and the mean sparsity of the budget each belongs to."""
    return options.priced, averages(options.priced, method, options.counted)


def of_block(ranks: dict[tuple[int, str], int], index: int) -> dict[str, int]:
    """Module -> rank of one block."""
    return {module: rank for (block, module), rank in ranks.items() if block == index}


def build_plan(
    source: DenseModel, method: Method, allocated: Allocated, reports: dict, calibration: dict | None
) -> Plan:
    """The plan of an allocation.

    Args:
        allocated: of :func:`allocate_ranks`.
        reports: (block, module) -> what compressing it would report; may be empty.
        calibration: description of the calibration tokens; the estimate of memory depends on them.
    """
    ranks = allocated.ranks
    modules = tuple(
        ModulePlan(
            block=u.block,
            module=u.module,
            rank=ranks[u.block, u.module],
            of=u.ranks[-1],
            weights=u.size(ranks[u.block, u.module]),
            dense_weights=u.dense,
            relative_error=reports.get((u.block, u.module), {}).get("relative_error"),
        )
        for u in allocated.options.units
    )
    removed = sum(m.dense_weights - m.weights for m in modules)
    parameters = unique_parameters(source.model)
    change, floats, other = _change(source, method, ranks)
    item = torch.empty((), dtype=source.dtype).element_size()
    cache = [_cache(source, method, i, ranks) for i in range(len(source))]
    experts = _experts(source, reports)
    idle, idle_after = _idle(source, method, {}), _idle(source, method, ranks)
    return Plan(
        model=source.name,
        method=method.describe(),
        modules=modules,
        counted_weights=allocated.options.weights,
        removed_weights=removed,
        parameters=parameters,
        parameters_after=parameters + change,
        bytes=parameters * item,
        bytes_after=(parameters + floats) * item + other,
        kv_bytes_per_token=sum(before for before, _ in cache) * item,
        kv_bytes_per_token_after=sum(after for _, after in cache) * item,
        peak_memory_bytes=_peak_memory(source, method, calibration),
        seconds=None,
        facts=allocated.facts | ({"zeros": removed} if method.leaves_zeros else {}),
        budget=allocated.budget,
        source_bytes=source.bytes_on_disk,
        calibration=calibration,
        gradient_windows=_sweep_windows(source, method, calibration),
        active_parameters=parameters - idle if experts else None,
        active_parameters_after=parameters + change - idle_after if experts else None,
        experts=experts,
        part=source.part.name if source.part.chosen else None,
        added_products=sum(method.added_products(source.meta_block(i), of_block(ranks, i)) for i in range(len(source))),
    )


def _change(source: DenseModel, method: Method, ranks) -> tuple[int, int, int]:
    """Change in parameters (biases included) and in numbers of the model's dtype, and bytes of codes and indices added."""
    parameters = floats = other = 0
    for i in range(len(source)):
        mine = of_block(ranks, i)
        view = source.meta_block(i)
        more, added = method.parameter_change(view, mine)
        parameters, other, floats = parameters + more, other + added, floats + method.float_change(view, mine)
    return parameters, floats, other


def _cache(source: DenseModel, method: Method, index: int, ranks) -> tuple[int, int]:
    """Numbers cached per token in a block, dense and planned."""
    if not source.architecture.decoder:
        return 0, 0
    view = source.meta_block(index)
    mine = of_block(ranks, index)
    return view.attention.cached, method.cached_numbers(view, mine)


def _idle(source: DenseModel, method: Method, ranks) -> int:
    """Parameters of experts that a token is not sent to, of all blocks together."""
    found = 0
    for i in range(len(source)):
        view = source.meta_block(i)
        if (experts := view.experts) and ranks.get((i, BLOCK)) != 0:
            mine = {module: rank for module, rank in of_block(ranks, i).items() if module.startswith("experts")}
            lost = -method.parameter_change(view, mine)[0] // experts.count if mine else 0
            found += (experts.count - experts.active) * (experts.parameters_at(experts.hidden) - lost)
    return found


def _experts(source: DenseModel, reports: dict) -> dict | None:
    """What the plan says of experts; with moments also how many tokens each saw, and was given because these were too few."""
    experts = next((view.experts for view in map(source.meta_block, range(len(source))) if view.experts), None)
    if experts is None:
        return None
    seen = {block: report for (block, _), report in reports.items() if "tokens" in report}
    return {
        "of_a_block": experts.count,
        "of_a_token": experts.active,
        "tokens_wanted": PER_UNIT * experts.hidden,
        "moment_bytes": 8 * experts.hidden**2,  # of one expert; there is one at a time
        **{fact: {str(block): report[fact] for block, report in seen.items()} for fact in ("tokens", "filled") if seen},
    }


def _peak_memory(source: DenseModel, method: Method, calibration: dict | None) -> int:
    """Estimate: what surrounds the blocks, the largest block twice, its moments, the residual streams."""
    item = torch.empty((), dtype=source.compute_dtype).element_size()
    largest = max(sum(p.numel() for p in b.parameters()) for b in source.blocks) * item
    around = (
        unique_parameters(source.model) - sum(sum(p.numel() for p in b.parameters()) for b in source.blocks)
    ) * item
    resident = 0 if source.streamed else tensor_bytes(source.model) - around
    tokens = held_out = 0
    if calibration:
        tokens, held_out = calibration["tokens"], calibration.get("held_out", 0) * mean_length(calibration)
    views = [source.meta_block(i) for i in range(len(source))]  # layers differ in kind
    each = [_moment_bytes(view, method.statistics(view), tokens, 2 if source.autocast else item) for view in views]
    moments, samples = (max(part) for part in zip(*each, strict=True))
    view, statistics = views[0], set().union(*map(method.statistics, views))
    width = view.attention.output.weight.shape[0]
    # Two streams side by side are three: dense behind attention and behind the block, and compressed.
    streams = 3 if any(STATISTICS[name].two_streams for name in statistics) else 1
    streams = len(source) + 1 if isinstance(method.allocation, Greedy) else streams  # of one round of the search
    probed = most_tokens(source)
    stream = (streams * tokens + 3 * held_out + 2 * probed) * width * (2 if source.autocast else item)
    gradients = method.gradients(view)
    of_gradients = 8 * numbers(view, gradients)
    moments += of_gradients
    backwards = of_gradients
    if gradients and calibration:
        backwards += sweep_memory(source, _sweep_windows(source, method, calibration) * mean_length(calibration))
    return int(around + resident + max(2 * largest + 2.5 * moments + samples + stream, largest + backwards))


def _moment_bytes(view: BlockView, statistics: set[str], tokens: int, item: int) -> tuple[int, int]:
    """Of the second moments of a block, of experts one at a time; and of the rows that are kept beside them."""
    width, hidden = view.attention.output.weight.shape[0], view.mlp.hidden if view.mlp else 0
    sides = {"mlp_hidden": (hidden, hidden), "mlp_feedback": (width, hidden), "change": (2, 1)}
    moments = sum(
        8 * math.prod(sides.get(name, (width, width)))
        for name in statistics - {"mlp_samples", INPUT, ROUTING}
        if STATISTICS[name].observer
    )
    rows = 4 * width * min(SAMPLE_ROWS * hidden, tokens) if "mlp_samples" in statistics else 0
    if INPUT in statistics:
        moments += 8 * view.experts.hidden**2
        rows += tokens * (item * width + 4 * view.experts.count)
    return moments, rows


def _sweep_windows(source: DenseModel, method: Method, calibration: dict | None) -> int | None:
    """Calibration windows that a backward pass runs over; ``None`` where there is none."""
    view = source.meta_block(0)
    names = method.gradients(view)
    if not names or calibration is None:
        return None
    return windows_for(calibration["num_samples"], mean_length(calibration), widest(view, names))
