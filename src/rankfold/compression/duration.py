"""Tell how long a compression takes before it is done.

    forwards and moments: one block on one batch, as the method's stages run it -- times blocks and tokens
    linear algebra:       what the method declares that it does                 -- times rates of this device

While a run lasts, :mod:`rankfold._utils.progress` estimates what is left by what was done.

Cost: a few passes of one block over one batch, and a second or two for the rates.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from .._utils.hardware import seconds_of
from .._utils.stopwatch import timed_run
from ..allocation import Measured, averages
from ..architectures import BlockView, read_linear
from ..calibration.backward import PASSES
from ..calibration.gradients import numbers
from ..calibration.runner import Stream, advance, attend, batch_tokens, measure, outputs, start
from ..data.batches import again, noise, tokens_in
from ..data.calibration_data import mean_length
from ..data.probes import most_tokens
from ..errors import OptionError
from ..methods import BLOCK, MeasurableMethod, Method, make_method
from ..methods.base import spared_passes
from ..methods.work import Work, of_trial, times
from ..models.dense_model import DenseModel
from ..report.plan import Plan
from .held_out import nats_per_token
from .importance import moment_provider, of_dense
from .kl_divergence import compared_tokens, fit_tokens, least_rank, tried_ranks
from .plan import including_experts
from .rates import seconds_for

HEAD_TOKENS = 512  # that norm and head are timed on
HEAD_PASSES = 3.0  # through norm and head that a backward pass takes


class Rates(NamedTuple):
    """Seconds of one block of this model on this device."""

    read: float  # a block
    forward: float  # a token
    stages: float  # a token through all that a compression does to a block, but for its linear algebra
    dense: float  # a token of a dense block, whose moments the allocation wants
    alone: float  # the same for a measured allocation
    head: float  # a token through norm and head


class Machine(NamedTuple):
    """How fast a compression runs somewhere else."""

    rates: Callable[[DenseModel, Method, Plan, str, int], Rates]  # of source, method, plan, mode and tokens of a sample
    seconds_for: Callable[[Work], float]
    count: int = 1  # of accelerators, which share experts, and the curves and trials of a measured allocation


def timed(the_plan: Plan, source: DenseModel, calibration: dict, mode: str, machine: Machine | None = None) -> Plan:
    """Return the plan with an estimate of the time :func:`rankfold.compress` takes.

    Args:
        calibration: description of the calibration tokens.
        mode: one of the method's.
        machine: where it will run; by default on the source's device, whose rates are measured.

    Raises:
        OptionError: unknown mode.
    """
    return replace(the_plan, seconds=sum(estimated_seconds(the_plan, source, calibration, mode, machine).values()))


@timed_run()  # not a part of the run that asks
def estimated_seconds(
    the_plan: Plan, source: DenseModel, calibration: dict, mode: str, machine: Machine | None = None
) -> dict[str, float]:
    """Estimate the seconds of every part of a compression; arguments as for :func:`timed`."""
    options = dict(the_plan.method)
    method = make_method(options.pop("method"), **options)
    if mode not in method.modes:
        raise OptionError(f"mode must be {' or '.join(method.modes)}, got {mode!r}")
    blocks, tokens, length = len(source), calibration["tokens"], mean_length(calibration)
    held_out = calibration.get("held_out", 0) * length
    here = machine or Machine(_measured_rates, partial(seconds_for, device=source.device))
    rates = here.rates(source, method, the_plan, mode, length)
    removed = sum(m.module == BLOCK and m.rank == 0 for m in the_plan.modules)
    passed = (tokens + held_out) * rates.stages + held_out * rates.forward + tokens * rates.dense
    seconds = {
        "reading and writing": 3 * blocks * rates.read,  # read, written, read back
        "blocks": blocks * passed + 2 * held_out * rates.head,
        "linear algebra": here.seconds_for(_work(source, method, the_plan, here.count)),
        "probe texts": 2 * most_tokens(source) * (blocks * rates.forward + rates.head),  # dense and compressed
        "search": tokens * method.allocation.search_passes(blocks, removed) * rates.forward,
    }
    if seconds["search"]:  # every candidate predicts the text
        seconds["search"] += tokens * rates.head * sum(blocks - gone for gone in range(removed))
    if the_plan.gradient_windows:
        passed = (PASSES + _sums(source, method)) * blocks * rates.forward + HEAD_PASSES * rates.head
        seconds["gradients"] = the_plan.gradient_windows * length * passed
    if isinstance(method, MeasurableMethod) and isinstance(method.allocation, Measured):
        samples, other_texts = calibration.get("held_out") or calibration["num_samples"], method.allocation.other_texts
        compared = compared_tokens(samples, length, other_texts=other_texts)
        seconds["measured allocation"] = _allocation(
            source, method, the_plan, calibration["tokens"], compared, rates, here
        )
    return seconds


def _sums(source: DenseModel, method: Method) -> float:
    """Forwards that summing a block's gradients is worth: a number of a sum takes what a weight does in a forward."""
    view = source.meta_block(len(source) // 2)
    weights = sum(read_linear(layer).weight.numel() for layer in view.layers.values())
    return numbers(view, method.gradients(view)) / weights


def _work(source: DenseModel, method: Method, the_plan: Plan, count: int) -> Work:
    """Count the linear algebra of all blocks; so many accelerators share that of the pieces that all run."""
    found = Work()
    for index in range(len(source)):
        view, ranks = source.meta_block(index), the_plan.ranks(index)
        if ranks.get(BLOCK) != 0:
            pieces = (piece for step in method.stages(view, ranks) for piece in step.pieces)
            shared = {module: ranks[module] for piece in pieces for module in piece.shared}
            found += method.work(view, {module: rank for module, rank in ranks.items() if module not in shared})
            found += times(method.work(view, shared), 1 / count) if shared else Work()
    return found


def _measured_rates(source: DenseModel, method: Method, the_plan: Plan, mode: str, length: int) -> Rates:
    """Run one block in the middle, whose kind most are of; the first where that reads keys and values of another."""
    ids = noise(source.part, max(1, batch_tokens(source) // length), length)
    tokens = tokens_in(ids, source.part)
    stream = start(source, ids, autocast=source.autocast)
    index = 0 if stream.hands_on else len(source) // 2
    clock = partial(seconds_of, device=source.device)
    read = clock(lambda: source.block(index))
    view = source.block(index)
    advance(view, stream.copy())  # warms up
    forward = min(clock(lambda: advance(view, stream.copy())) for _ in range(2)) / tokens
    wanted = of_dense(source, method) if mode == "sequential" else set()
    dense = clock(lambda: measure(view, stream.copy(), wanted, step=True)) / tokens if wanted else 0.0
    alone = 0.0
    if isinstance(method, MeasurableMethod) and isinstance(method.allocation, Measured):
        statistics = method.alone(view).statistics(view)
        alone = clock(lambda: measure(view, stream.copy(), statistics, step=True)) / tokens
    stages = clock(lambda: _through_stages(source, method, view, the_plan.ranks(index), stream, mode)) / tokens
    if mode == "sequential" and source.offload is None:  # as in Stream.keep_mixed
        spared = spared_passes(method.stages(view, the_plan.ranks(index)))
        stages -= spared * clock(lambda: attend(view, stream)) / tokens if spared else 0.0
    some = noise(source.part, 1, min(length, HEAD_TOKENS))
    after = start(source, some, autocast=source.autocast)
    (batch,), is_decoder = again(some, after.hidden), source.architecture.decoder
    head = clock(lambda: nats_per_token(source, some, after) if is_decoder else outputs(source, batch, after))
    head /= tokens_in(some, source.part)
    return Rates(read, forward, stages, dense, alone, head)


def _through_stages(source: DenseModel, method: Method, view: BlockView, ranks, stream: Stream, mode: str) -> None:
    """Measure a block as a compression does, and run its dense modules in place of the smaller ones."""
    provider = moment_provider(source, method, stream.copy(), mode)
    provider.enter(view)
    for stage in method.stages(view, ranks):
        provider.measure(view, stage.statistics)
    provider.follow(view)


def _allocation(
    source: DenseModel,
    method: MeasurableMethod,
    the_plan: Plan,
    tokens: int,
    compared: int,
    rates: Rates,
    machine: Machine,
) -> float:
    """Estimate the seconds of :func:`rankfold.compression.kl_divergence.measure_kl_sensitivity`.

    Args:
        tokens: of the calibration set.  compared: that predictions are compared on.
    """
    blocks, work, trials = len(source), Work(), 0
    views = source.meta_blocks()
    units = [unit for view in views for unit in method.prunable_modules(view)]
    experts = [unit for view in views if (unit := method.expert_counts(view))]
    losing = including_experts(averages(units, method, the_plan.counted_weights), experts)
    units = [unit for unit in units + experts if unit.key in losing]
    for unit in units:
        view, average = views[unit.block], losing[unit.key]
        alone, tried = method.alone(view), tried_ranks(method, unit, average)
        trials += len(tried)
        work += alone.work_of_curve(view, unit, least_rank(unit, average))
        for rank in tried:
            work += of_trial(alone.work(view, {unit.module: rank}))
    fit = min(tokens, fit_tokens(units))
    passed = blocks * fit * rates.alone + compared * rates.forward * (blocks + trials + trials * (blocks - 1) / 2)
    return (
        passed + blocks * rates.read + compared * (trials + 1) * rates.head + machine.seconds_for(work) / machine.count
    )
