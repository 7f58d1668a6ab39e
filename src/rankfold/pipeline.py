"""calibrate -> allocate -> decompose -> replace -> verify: the whole of rankfold on one page.

    model --- blocks --- token batches stream through one block at a time ---> second moments
                                                                                     |
              checkpoint <--- smaller modules <--- method: factors <--- ranks <--- allocation

Every step that knows a model family, a method or a file format lives elsewhere.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from ._utils.files import check_output
from ._utils.memory import release_memory
from ._utils.progress import one_run, track
from ._utils.stopwatch import timed_run
from .calibration.runner import advance, measure, start
from .calibration.statistics import STATISTICS, STORED
from .calibration.store import MomentStore
from .calibration.streams import HiddenStates
from .calibration.supply import FromDense, FromStore, FromStreams
from .checkpoint.config import compressed_config
from .checkpoint.load import described
from .checkpoint.run import Run
from .compression.block import Work, decompose, run_stages
from .compression.budget import RankOptions, rank_options
from .compression.held_out import HeldOut, NothingHeldOut
from .compression.importance import (
    available,
    gradients_of,
    measure_allocation,
    needed,
    of_dense,
    shared_of,
    statistics_of,
)
from .compression.output import FolderWriter, MemoryWriter
from .compression.plan import allocate_ranks, build_plan, check, divergence_for_stock, kept_blocks, of_block
from .compression.probe_texts import follow_probe_texts
from .compression.replace import in_model_coordinates, passing, replace
from .compression.validate_spec import validated
from .data.calibration_data import CalibrationData
from .data.tokens import check_fits, say_if_few
from .errors import OptionError, check_choice
from .methods import BlockResult, Method, as_method
from .models.auto_classes import auto_class
from .models.block_reader import BlockReader
from .models.dense_model import DenseModel
from .report.identity import moments_identity, published_counts, run_identity
from .report.model_card import model_card
from .report.plan import Plan
from .report.record import run_record
from .version import __version__

__all__ = ["calibrate", "compress", "plan"]


@one_run()
def calibrate(
    source: DenseModel, tokens: CalibrationData, output: str | Path | None = None, *, statistics: set[str] | None = None
) -> MomentStore:
    """Measure the second moments of every block of the dense model, in one pass.

    Args:
        source: an open model.
        tokens: calibration windows.
        output: folder to keep the moments in; ``None``: in memory. What an earlier call left there is read and checked, and
            only what is missing or damaged is measured.
        statistics: names out of :data:`rankfold.calibration.statistics.STATISTICS`; all by default, so that any method can be
            computed from them.

    Raises:
        OptionError: there is no statistic of a name, or none that one pass of the dense model can measure.
        NumericsError: a weight or activation is NaN or infinite.
        CheckpointError: ``output`` holds something else, or another process writes it.
    """
    for name in statistics or ():
        check_choice("statistic", name, sorted(STORED))
    statistics = available(validated(source), statistics or set(STORED))
    identity = moments_identity(source, tokens, statistics)
    with MomentStore.filling(identity, Path(output) if output else None, tokens.held_out) as store:
        missing = store.missing(len(source))
        if missing:
            _measure_all(source, tokens, statistics, store, missing)
    return store


def _measure_all(
    source: DenseModel, tokens: CalibrationData, statistics: set[str], store: MomentStore, missing: set[int]
) -> None:
    stream, read = _start(source, tokens), BlockReader(source)
    for index in track(range(max(missing) + 1), "calibrating"):
        view = read(index)
        if index in missing:
            store[index] = measure(view, stream, statistics, step=True)
        else:
            advance(view, stream)
        del view
        release_memory()


@one_run()
def plan(
    source: DenseModel,
    method: Method | str,
    tokens: CalibrationData | None = None,
    *,
    moments: MomentStore | None = None,
) -> Plan:
    """What :func:`compress` would do: ranks, counts, cache, memory, and with moments the error of every module.

    Args:
        source: an open model.
        method: what to do: a method, or the name of one, with its defaults.
        tokens: calibration windows; needed by the measured allocation.
        moments: of the dense model; needed by the influence allocations and for predicted errors.
    """
    method = as_method(method)
    check_mode(method, method.modes[0], moments is not None)
    validated(source)
    gradients = gradients_of(source, method, tokens) if moments or method.allocation.needs_text else None
    ranks = rank_options(source, method)
    check(ranks, method)
    allocated = allocate_ranks(
        ranks, method, measure_allocation(source, method, ranks, moments, tokens, gradients=gradients)
    )
    reports = {}
    if moments is not None:
        moments.check(source, statistics_of(source, method))
        shared = shared_of(source, method, moments)
        for index in track(range(len(source)), "predicting"):
            view = source.block(index)
            (stage,) = method.stages(view, of_block(allocated.ranks, index))
            result = decompose(stage, view, moments[index] | shared | (gradients[index] if gradients else {}))
            reports |= {(index, module): report for module, report in result.reports.items()}
    calibration = tokens.describe() if tokens else moments.identity["tokens"] if moments else None
    return build_plan(source, method, allocated, reports, calibration)


@timed_run()
def compress(
    source: DenseModel,
    method: Method | str,
    tokens: CalibrationData | None = None,
    output: str | Path | None = None,
    *,
    moments: MomentStore | None = None,
    mode: str = "sequential",
    on_plan: Callable[[Plan], None] | None = None,
) -> nn.Module | Path:
    """Compress a model.

    Args:
        source: an open model; it is not changed.
        method: what to do, e.g. ``MoDeGPT(sparsity=0.3)``, or the name of a method, with its defaults.
        tokens: calibration windows; not needed with ``moments``.
        output: folder to write, block by block (resumable); ``None`` returns the model in memory.
        moments: of the dense model, from :func:`calibrate`; implies ``mode="one-pass"``.
        mode: ``sequential``: every block is measured on what the compressed blocks before it produce (MoDeGPT App.
            B.2). ``one-pass``: all blocks are measured on the dense model.
        on_plan: called with the plan before any block is compressed.

    Returns:
        The folder written, or the compressed model.

    Raises:
        OptionError, UnsupportedModelError, NumericsError, CheckpointError: with one line saying what to do.
    """
    method = as_method(method)
    mode = checked(method, tokens, moments, mode, output)
    validated(source)
    identity = run_identity(source, method, tokens.describe() if tokens else moments.identity["tokens"], mode)
    run = Run(output, identity) if output is not None else None
    with run.working() if run else contextlib.nullcontext():
        if run and run.complete:  # what an earlier process could not rename any more
            return run.publish()
        return carry_out(source, method, tokens, moments, identity, run, on_plan)


@one_run()
def carry_out(
    source: DenseModel,
    method: Method,
    tokens: CalibrationData | None,
    moments: MomentStore | None,
    identity: dict,
    run: Run | None,
    on_plan: Callable[[Plan], None] | None,
) -> nn.Module | Path:
    """Compress a model whose output is held; arguments as for :func:`compress`, and what the run is known by."""
    mode, calibration = identity["mode"], identity["calibration"]
    ranks = rank_options(source, method, run.times if run else None)
    moments, gradients, shared, scores = _dense_passes(source, method, ranks, tokens, moments, mode, run)
    allocated = allocate_ranks(ranks, method, scores)
    for_stock = divergence_for_stock(source, method, scores)
    if for_stock is not None:
        allocated = allocated._replace(facts=allocated.facts | {"divergence_for_stock": for_stock})
    the_plan = build_plan(source, method, allocated, {}, calibration)
    if on_plan:
        on_plan(the_plan)
    kept = kept_blocks(allocated.ranks, len(source))
    work = Work(
        source,
        method,
        BlockReader(source),
        _supply(source, method, tokens, moments, mode),
        _watch(source, tokens.held_out if tokens else moments.held_out, mode),
        follow_probe_texts(source),
        FolderWriter(source, run, kept) if run else MemoryWriter(source, kept),
        gradients,
        shared,
    )
    blocks, basis = [], None
    for index in track(range(len(source)), "compressing", note=work.watch.so_far):
        block, basis = _compress_block(work, index, of_block(allocated.ranks, index), basis)
        blocks.append(block)
    outcome = {
        "held_out": work.watch.finish(the_plan.sparsity, can_exclude=method.can_exclude_blocks),
        "probe_texts": work.probes.finish(the_plan.sparsity),
    }
    return work.into.finish(*_documents(work, the_plan, blocks, identity, outcome, run))


def _documents(work: Work, the_plan: Plan, blocks: list[BlockResult], identity: dict, outcome, run):
    """Config, model card and run record of the result."""
    source = work.source
    modules = {path: spec for block in blocks for path, spec in block.modules.items()}
    counts = published_counts(the_plan)
    description = {"rankfold_version": __version__, **identity, "counts": counts, **outcome}
    config = compressed_config(source, description, modules, work.into.kept)
    stock, auto = described(config) is None, auto_class(source.model.config, type(source.model).__name__).__name__
    reports = {str(index): block.reports for index, block in enumerate(blocks)}
    name, before = (run.output.name, run.earlier) if run else (source.name, None)
    record = run_record(source, description | ({"before": before} if before else {}), the_plan, reports)
    return config, model_card(record, name, stock=stock, auto=auto), record


def _supply(source: DenseModel, method: Method, tokens, moments, mode: str) -> FromStore | FromDense | FromStreams:
    if moments is not None:
        return FromStore(moments)
    if mode == "one-pass":
        return FromDense(_start(source, tokens))
    two = any(STATISTICS[name].two_streams for name in statistics_of(source, method))
    stream = _start(source, tokens)
    return FromStreams(HiddenStates(stream, stream.copy() if two else None))


def _watch(source: DenseModel, held_out, mode: str) -> HeldOut | NothingHeldOut:
    if held_out is None:
        return NothingHeldOut()
    check_fits(held_out, source)
    return HeldOut(source, held_out, sequential=mode == "sequential")


def checked(method: Method, tokens, moments, mode: str, output) -> str:
    """The mode, once everything that can be checked without the model is."""
    mode = check_mode(method, mode, moments is not None)
    if (tokens is None) == (moments is None):
        raise OptionError("give either calibration tokens or moments, not both and not neither")
    if output is not None:
        check_output(Path(output))
    return mode


def check_mode(method: Method, mode: str, moments: bool) -> str:
    """The mode a method runs in, with moments of the dense model or without.

    Raises:
        OptionError: there is no such mode, or not with this method.
    """
    if mode not in ("sequential", "one-pass"):
        raise OptionError(f"mode must be sequential or one-pass, got {mode!r}")
    mode = "one-pass" if moments else mode
    if mode not in method.modes:
        raise OptionError(
            f"method {method.name} measures every block on what the compressed ones before it send, so it takes text and mode "
            f"{method.modes[0]}, not moments or mode {mode}; or use --method modegpt"
        )
    return mode


def _dense_passes(source: DenseModel, method: Method, ranks: RankOptions, tokens, moments, mode: str, run: Run | None):
    """Moments of the dense model, where they are there already, statistics of a backward pass, what is of all blocks together,
    and influence scores or costs, each where method or allocation wants them.

    Ranks of an influence allocation are known only behind the last block: its one pass keeps all moments on the way.
    """
    check(ranks, method)  # what cannot be reached is said at once
    gradients = gradients_of(source, method, tokens, run)
    first = of_dense(source, method)
    if moments is None and first:
        statistics = needed(source, method) if mode == "one-pass" else first
        moments = calibrate(source, tokens, run.moments if run else None, statistics=statistics)
    shared = shared_of(source, method, moments)
    scores = measure_allocation(source, method, ranks, moments, tokens, run, gradients)
    if moments is None or mode == "sequential":
        return None, gradients, shared, scores
    moments.check(source, statistics_of(source, method))
    return moments, gradients, shared, scores


def _compress_block(
    work: Work, index: int, ranks: dict[str, int], basis: Tensor | None
) -> tuple[BlockResult, Tensor | None]:
    """Measure, decompose, replace and keep one block, or take it from an earlier run; then move on.

    Args:
        basis: the coordinates in which the block before writes the stream.

    Returns:
        Descriptions by full path and what was measured; the tensors went to where blocks go. And the coordinates in which this
        block writes the stream.
    """
    source, _, read, supply, watch, probes, into, *_ = work
    view = dataclasses.replace(read(index), basis=basis)
    release_memory()
    done = index in into
    for follower in (supply, watch, probes):
        follower.enter(view, skip=done)
    if done:
        result = into.load(view)
        view = replace(view, result, source)
    else:
        view, result = run_stages(work, view, ranks)
        into.keep(view, result)
    stays = index in into.kept
    view = in_model_coordinates(view, result.basis) if stays else passing(view)
    release_memory()
    for follower in (into, supply, watch, probes):
        follower.follow(view)
    release_memory()
    modules = {f"{into.path(index)}.{path}".rstrip("."): spec for path, spec in result.modules.items()} if stays else {}
    return BlockResult(modules, {}, result.reports), result.basis


def _start(source: DenseModel, tokens: CalibrationData):
    check_fits(tokens.ids, source)
    say_if_few(tokens.ids, source)
    return start(source, tokens.ids, autocast=source.autocast)
