"""Ranks under the budget, and everything that can be said before a weight changes."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from .._utils.present import present
from ..allocation import (
    Greedy,
    Measured,
    RankCosts,
    Uniform,
    allocate,
    averages,
    tensor_bytes,
    to_remove,
    unique_parameters,
)
from ..allocation.one_rank import Level, freed, levels
from ..architectures import BlockView
from ..calibration.backward import sweep_memory, windows_for
from ..calibration.experts import INPUT, PER_UNIT, ROUTING
from ..calibration.gradients import numbers, widest
from ..calibration.likelihood import losses_memory
from ..calibration.offload import Offload
from ..calibration.runner import batch_tokens
from ..calibration.statistics import SAMPLE_ROWS, STATISTICS, dense_inputs
from ..data.calibration_data import mean_length
from ..data.probes import most_tokens
from ..errors import OptionError, UnsupportedModelError
from ..methods import BLOCK, EXPERT_COUNT, Method, PrunableModule
from ..methods.base import spared_passes
from ..models.dense_model import DenseModel
from ..models.weights import buffer_bytes
from ..report.plan import ModulePlan, Plan
from .budget import RankOptions, rank_options
from .verify import reading_back

# Of what is counted: removing this much more than was asked for is worth a line.
ROUNDING = 0.01


Blocks = list[tuple[BlockView, dict[str, int]]]  # on the meta device, and module -> rank
Reports = dict[tuple[int, str], dict[str, Any]]  # (block, module) -> what compressing it reports


class Allocated(NamedTuple):
    """What :func:`allocate_ranks` decided."""

    ranks: dict[tuple[int, str], int]  # (block, module) -> rank
    facts: dict  # of the allocation, for the record
    options: RankOptions  # what there was to choose from
    budget: dict  # what it counts, how much there is of it, how much was to go and goes


def allocate_ranks(options: RankOptions, method: Method, measured: Any = None) -> Allocated:
    """Choose ranks under the budget (:func:`rankfold.allocation.allocate`), and how many experts stay where the method
    lets the allocation choose that too: as many as with which all is measured to cost least."""
    found = _allocated(options, method, measured)
    if not options.experts or not found.budget["asked"]:
        return found
    fewer = (_with_fewer_experts(options, level, method, measured) for level in levels(options.priced_experts)[:-1])
    return min([found, *filter(None, fewer)], key=lambda one: sum(measured[key][r] for key, r in one.ranks.items()))


def _with_fewer_experts(options: RankOptions, level: Level, method: Method, measured: RankCosts) -> Allocated | None:
    """Choose the other ranks; ``None`` where these experts are more than has to go, or their cost was not measured."""
    choice = options.with_experts(level)
    fewer = [unit for unit in choice.priced if unit.fixed]
    known = all(unit.ranks[0] in measured.get(unit.key, {}) for unit in fewer)
    if not known or sum(unit.dense for unit in fewer) > to_remove(options.priced, method, options.counted):
        return None
    found = _allocated(choice, method, measured)
    costs = {f"{unit.block}.{unit.module}": measured[unit.key][unit.ranks[0]] for unit in fewer}
    return found._replace(facts=found.facts | {"divergence": found.facts.get("divergence", {}) | costs})


def _allocated(options: RankOptions, method: Method, measured) -> Allocated:
    units, counted = options.priced, options.counted
    ranks, facts = allocate(units, method, counted, measured)
    ranks |= {(block, unit.module): ranks[unit.key] for unit in units for block in unit.members}
    removed = sum(u.dense - u.size(ranks[u.key]) for u in units)
    amounts: dict[str, Any] = {"counted": counted, "asked": to_remove(units, method, counted), "removed": removed}
    amounts["excess"] = _excess(units, ranks, method, amounts)
    return Allocated(ranks, facts, options, {**options.facts, **amounts})


def divergence_for_stock(source: DenseModel, method: Method, costs) -> float | None:
    """Return the expected divergence of the predictions, in nats per token, with the ranks that ``target="stock"``
    chooses.

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
    """Return why the ranks remove more than was asked for, where that is more than their rounding explains."""
    counted, asked, removed = (amounts[name] for name in ("counted", "asked", "removed"))
    if removed - asked <= ROUNDING * counted:
        return None
    smaller = [unit for unit in units if ranks[unit.key] < unit.ranks[-1]]
    fixed = sum(unit.dense - unit.size(ranks[unit.key]) for unit in units if unit.fixed)
    if fixed > asked:
        reason = f"the width of heads that was asked for takes {fixed / counted:.1%}"
    elif any(unit.module == BLOCK for unit in smaller):
        least = min(unit.dense for unit in smaller if unit.module == BLOCK)
        reason = f"whole blocks are removed, and the smallest of these is {least / counted:.1%}"
    elif method.one_rank:
        free = [unit for unit in units if not unit.fixed]
        less = max((amount for level in levels(free) if (amount := freed(free, level)) < removed), default=0)
        what = "number of experts" if free[0].module == EXPERT_COUNT else "width"
        reason = f"all blocks have one {what}, and the next larger one removes {max(0, less) / counted:.1%}"
    elif method.allocation.may_exceed:
        reason = "removing more was measured to cost nothing"
    else:
        places = [(unit, unit.ranks.index(ranks[unit.key])) for unit in smaller]
        step = min(unit.sizes[place + 1] - unit.sizes[place] for unit, place in places)
        reason = f"the smallest step between two ranks is {step / counted:.1%}"
    return f"{removed / counted:.1%} is removed, more than the {asked / counted:.1%} asked for: {reason}"


def kept_blocks(ranks: dict[tuple[int, str], int], blocks: int) -> tuple[int, ...]:
    """List which of the dense model's blocks are in the result, ascending."""
    return tuple(block for block in range(blocks) if ranks.get((block, BLOCK)) != 0)


def shares(options: RankOptions, method: Method) -> tuple[list[PrunableModule], dict]:
    """Return the units of all blocks, and the mean sparsity of the budget each belongs to."""
    found = averages(options.priced, method, options.counted)
    return options.priced + options.priced_experts, including_experts(found, options.priced_experts)


def including_experts(
    found: dict[tuple[int, str], float], experts: list[PrunableModule]
) -> dict[tuple[int, str], float]:
    """Return mean sparsities with those of how many experts stay: where that is chosen, there is one of all modules."""
    average = max(found.values(), default=0.0)
    return found | {unit.key: average for unit in experts if average}


def of_block(ranks: dict[tuple[int, str], int], index: int) -> dict[str, int]:
    """Return module -> rank of one block."""
    return {module: rank for (block, module), rank in ranks.items() if block == index}


def with_ranks(source: DenseModel, ranks: dict[tuple[int, str], int]) -> Blocks:
    """Return every block with its ranks."""
    return [(view, of_block(ranks, view.index)) for view in source.meta_blocks()]


def build_plan(
    source: DenseModel, method: Method, allocated: Allocated, reports: dict, calibration: dict | None
) -> Plan:
    """Return the plan of an allocation.

    Args:
        allocated: of :func:`allocate_ranks`.
        reports: (block, module) -> what compressing it would report; may be empty.
        calibration: description of the calibration tokens; the estimate of memory depends on them.
    """
    ranks = allocated.ranks
    modules = tuple(row for unit in allocated.options.units for row in _rows(unit, ranks[unit.key], reports))
    modules = tuple(sorted(modules, key=lambda row: row.block))  # of a unit with members they are of several blocks
    removed = sum(m.dense_weights - m.weights for m in modules)
    blocks = with_ranks(source, ranks)
    changes = [method.parameter_change(*block) for block in blocks]
    parameters = unique_parameters(source.model)
    parameters_after = parameters + sum(change for change, _ in changes)
    floats_after = parameters + sum(method.float_change(*block) for block in blocks)
    caching = blocks if source.architecture.decoder else []
    item = source.dtype.itemsize
    buffers = buffer_bytes(source.model, source.dtype)
    gone = sum(buffer_bytes(view.module, source.dtype) for view, mine in blocks if mine.get(BLOCK) == 0)
    experts = _experts(blocks, reports)
    idle, idle_after = _idle(method, [(view, {}) for view, _ in blocks]), _idle(method, blocks)
    return Plan(
        model=source.name,
        method=method.describe(),
        modules=modules,
        counted_weights=allocated.options.weights,
        removed_weights=removed,
        parameters=parameters,
        parameters_after=parameters_after,
        bytes=parameters * item + buffers,
        bytes_after=floats_after * item + sum(added for _, added in changes) + buffers - gone,
        kv_bytes_per_token=sum(view.attention.cached for view, _ in caching) * item,
        kv_bytes_per_token_after=sum(method.cached_numbers(*block) for block in caching) * item,
        peak_memory_bytes=peak_memory(source, method, calibration, source.offload, blocks),
        seconds=None,
        facts=allocated.facts
        | ({"zeros": removed} if method.leaves_zeros else {})
        | ({"caution": method.caution} if method.caution else {}),
        budget=allocated.budget,
        source_bytes=source.bytes_on_disk,
        calibration=calibration,
        gradient_windows=_sweep_windows(source, method, calibration),
        active_parameters=parameters - idle if experts else None,
        active_parameters_after=parameters_after - idle_after if experts else None,
        experts=experts,
        part=source.part.name if source.part.chosen else None,
        added_products=sum(method.added_products(*block) for block in blocks),
    )


def _rows(unit: PrunableModule, rank: int, reports: Reports) -> list[ModulePlan]:
    """Return the plan of a module of one block, or of each of its members, which share what is stored evenly."""
    blocks, weights = (unit.block, *unit.members), unit.size(rank)
    return [
        ModulePlan(
            block=block,
            module=unit.module,
            rank=rank,
            of=unit.ranks[-1],
            weights=weights // len(blocks) + (place < weights % len(blocks)),
            dense_weights=unit.dense // len(blocks),
            relative_error=reports.get((block, unit.module), {}).get("relative_error"),
        )
        for place, block in enumerate(blocks)
    ]


def _idle(method: Method, blocks: Blocks) -> int:
    """Count the parameters of experts that a token is not sent to, of all blocks together."""
    found = 0
    for view, ranks in blocks:
        if (experts := view.experts) and ranks.get(BLOCK) != 0:
            left = ranks.get(EXPERT_COUNT, experts.count)
            mine = {module: rank for module, rank in ranks.items() if module.startswith("experts")}
            lost = -method.parameter_change(view, mine)[0] // experts.count if mine else 0
            found += max(0, left - experts.active) * (experts.parameters_at(experts.hidden) - lost)
    return found


def _experts(blocks: Blocks, reports: Reports) -> dict | None:
    """Describe the experts for the plan; with moments also how many tokens each saw, or was given if too few."""
    experts = next((view.experts for view, _ in blocks if view.experts), None)
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


def peak_memory(
    source: DenseModel, method: Method, calibration: dict | None, offload: Offload | None, blocks: Blocks
) -> int:
    """Estimate the peak in bytes, of tensors: what surrounds the blocks, the residual streams, what attention mixes
    where that is kept, and the most that measuring or decomposing a block, predicting held-out text, reading back or a
    backward pass takes."""
    item = source.compute_dtype.itemsize
    active = 2 if source.autocast else item
    largest, outer, held = _held(source)
    tokens = held_out = 0
    if calibration:
        tokens, held_out = calibration["tokens"], calibration.get("held_out", 0) * mean_length(calibration)
    views = source.meta_blocks()
    # What experts receive, and rows that are kept, are of the samples of all accelerators.
    everywhere = calibration.get("tokens_of_all", tokens) if calibration else 0
    each = [_moment_bytes(view, method.statistics(view), everywhere, active) for view in views]
    moments, samples = (max(part) for part in zip(*each, strict=True))
    view = max(views, key=lambda view: (bool(view.mlp or view.experts), _hidden(view)))
    statistics = set().union(*map(method.statistics, views))
    width, probes = view.width, most_tokens(source)
    # Two streams side by side are three: dense after attention and after the block, and compressed.
    two = any(STATISTICS[name].two_streams for name in statistics)
    streams = 3 if two else 1
    streams = len(source) + 1 if isinstance(method.allocation, Greedy) else streams  # of one round of the search
    here = min(tokens, offload.held * batch_tokens(source)) if offload else tokens
    stream = (streams * here + 3 * held_out + 2 * probes) * width * active
    compared = {"mlp_hidden": _hidden(view)}  # inputs of dense layers; others are as wide as the stream
    stream += sum(compared.get(name, width) for name in dense_inputs(statistics)) * (here + held_out) * active
    if any(spared_passes(method.stages(*block)) for block in blocks):
        kept = held_out if offload else here + held_out
        stream += kept * view.attention.heads * view.attention.head_dim * active
    if source.architecture.handed:
        # Of two kinds of layers, for those that read them.
        kept = 2 * max(view.attention.cached for view in views) if any(v.attention.reads_others for v in views) else 0
        each = getattr(source.config, source.architecture.handed) * len(source) + kept
        stream += (tokens + held_out + probes) * each * item
    of_gradients = 8 * max(numbers(view, method.gradients(view)) for view in views)
    backwards = of_gradients * 5 // 4  # half of them once more, as sums in fp32
    if calibration and (windows := _sweep_windows(source, method, calibration)):
        backwards += sweep_memory(source, windows * mean_length(calibration))
    # What held-out samples must confirm needs their moments beside its own: a correction by what the stream lacks.
    confirmed = any(STATISTICS[name].two_streams and not STATISTICS[name].dense_input for name in statistics)
    moments = (2 if confirmed and held_out else 1) * moments + of_gradients
    hidden, (squares, sides) = _hidden(view), method.workspace
    widest = hidden if statistics & {"mlp_hidden", INPUT} else width
    decomposing = 2 * largest + moments + 8 * int(squares * widest**2 + sides * hidden * width)
    passing = 4 * min(max(tokens, probes), batch_tokens(source)) * (6 * width + 3 * hidden)  # activations of a batch
    # Half of every moment once more, as sums in fp32.
    measuring = (1 + method.holds_dense) * largest + moments * 5 // 4 + passing
    predicting = losses_memory(source, min(max(held_out, probes), batch_tokens(source)))
    at_the_end = max(predicting, largest + reading_back(source, outer))
    working = max(max(decomposing, measuring) + samples, at_the_end) + stream
    return int(held + max(working, largest + backwards))


def measuring_memory(source: DenseModel, statistics: set[str], tokens: int) -> int:
    """Estimate the peak in bytes, of tensors, of measuring every block of the dense model once.

    Args:
        tokens: of the calibration samples.
    """
    active = 2 if source.autocast else source.compute_dtype.itemsize
    (largest, _, held), views = _held(source), source.meta_blocks()
    seen = [{name for name in statistics if STATISTICS[name].seen_in(view)} for view in views]
    each = [_moment_bytes(view, names, tokens, active) for view, names in zip(views, seen, strict=True)]
    moments, samples = (max(part) for part in zip(*each, strict=True))
    view = max(views, key=_hidden)
    width, at_once = view.width, batch_tokens(source)
    here = min(tokens, source.offload.held * at_once) if source.offload else tokens
    passing = 4 * min(tokens, at_once) * (8 * width + 3 * _hidden(view))  # all that is observed is held at once
    return int(held + largest + moments * 5 // 4 + samples + passing + here * width * active)


def _held(source: DenseModel) -> tuple[int, int, int]:
    """Return the bytes of the largest block, the parameters around the blocks, and the bytes that are held
    throughout."""
    item = source.compute_dtype.itemsize
    blocks = [unique_parameters(block) for block in source.blocks]
    outer = unique_parameters(source.model) - sum(blocks)
    held = tensor_bytes(source.model) if source.is_resident else outer * item
    return max(blocks) * item, outer, held


def _hidden(view: BlockView) -> int:
    """Return the hidden units of the MLP of a block, or of one of its experts."""
    return view.experts.hidden if view.experts and not view.mlp else view.hidden


def _moment_bytes(view: BlockView, statistics: set[str], tokens: int, item: int) -> tuple[int, int]:
    """Count bytes of the second moments of a block, of experts one at a time; and of the rows kept beside them."""
    width, hidden = view.width, view.mlp.hidden if view.mlp else 0
    squares = dict.fromkeys(("mlp_hidden", "dense_mlp_hidden"), (hidden, hidden))
    sides = squares | {"mlp_feedback": (width, hidden), "change": (2, 1)}
    moments = sum(
        8 * math.prod(sides.get(name, (width, width)))
        for name in statistics - {"mlp_samples", INPUT, ROUTING}
        if STATISTICS[name].observer
    )
    rows = 4 * width * min(SAMPLE_ROWS * hidden, tokens) if "mlp_samples" in statistics else 0
    if INPUT in statistics:
        experts = present(view.experts)
        moments += 8 * experts.hidden**2
        rows += tokens * (item * width + 4 * experts.count)
    return moments, rows


def _sweep_windows(source: DenseModel, method: Method, calibration: dict | None) -> int | None:
    """Count the calibration samples that a backward pass runs over; ``None`` where there is none."""
    outputs = max(widest(view, method.gradients(view)) for view in source.meta_blocks())
    if not outputs or calibration is None:
        return None
    return windows_for(calibration["num_samples"], mean_length(calibration), outputs)
