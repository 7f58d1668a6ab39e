"""calibrate -> allocate -> decompose -> replace -> verify: the whole of rankfold on one page.

    model --- blocks --- token batches stream through one block at a time ---> second moments
                                                                                     |
              checkpoint <--- smaller modules <--- method: factors <--- ranks <--- allocation

Every step that knows a model family, a method or a file format lives elsewhere.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ._utils.files import check_output
from ._utils.memory import release_memory
from ._utils.present import present
from ._utils.processes import from_first, is_first, together
from ._utils.progress import one_run, track
from ._utils.sizes import size_text
from ._utils.stopwatch import timed_run
from .calibration.providers import MomentProvider, StoredMoments
from .calibration.runner import Stream, advance, measure, start
from .calibration.statistics import STORED, dense_inputs
from .calibration.store import MomentStore
from .checkpoint.config import compressed_config
from .checkpoint.load import described
from .checkpoint.run import RunFolder
from .compression.block import RunContext, decompose, run_stages, sent_by
from .compression.budget import rank_options
from .compression.held_out import follow_held_out
from .compression.importance import (
    DenseMeasures,
    available,
    gradients_of,
    moment_provider,
    needed,
    of_dense,
    shared_of,
    statistics_of,
)
from .compression.output import BlockWriter, FolderWriter, MemoryWriter, NoWriter
from .compression.plan import (
    allocate_ranks,
    build_plan,
    divergence_for_stock,
    kept_blocks,
    measuring_memory,
    of_block,
)
from .compression.probe_texts import follow_probe_texts
from .compression.replace import in_model_coordinates, passing, replace
from .compression.result import CompressionResult
from .compression.validate_spec import validated
from .data.calibration_data import CalibrationData
from .data.tokens import check_fits, say_if_few
from .errors import OptionError, check_choice, option
from .exports.gguf_size import with_file
from .methods import BlockResult, Method
from .models.auto_classes import auto_class_name
from .models.block_reader import BlockReader
from .models.dense_model import DenseModel
from .report.goal import Goal
from .report.identity import moments_identity, published_counts, run_identity
from .report.model_card import model_card
from .report.plan import Plan
from .report.record import run_record
from .version import __version__

log = logging.getLogger(__name__)


@one_run()
def calibrate(
    source: DenseModel, tokens: CalibrationData, output: str | Path | None = None, *, statistics: set[str] | None = None
) -> MomentStore:
    """Measure the second moments of every block in one pass; arguments as for :func:`rankfold.calibrate`."""
    for name in statistics or ():
        check_choice("statistic", name, sorted(STORED))
    statistics = available(validated(source), statistics or set(STORED))
    identity = from_first(lambda: moments_identity(source, tokens, statistics))
    with MomentStore.filling(identity, Path(output) if output and is_first() else None, tokens.held_out) as store:
        missing = from_first(lambda: store.missing(len(source)))
        if missing:
            if output:  # elsewhere the plan of the run says it
                memory = measuring_memory(source, statistics, tokens.describe()["tokens"])
                log.info("memory about %s in addition to the program and tokenising", size_text(memory))
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
    method: Method,
    tokens: CalibrationData | None = None,
    *,
    moments: MomentStore | None = None,
    goal: Goal | None = None,
) -> Plan:
    """Return what :func:`compress` would do; arguments as for :func:`rankfold.plan` and :func:`compress`."""
    check_mode(method, method.modes[0], stored=moments is not None)
    validated(source)
    gradients = gradients_of(source, method, tokens) if moments or method.allocation.needs_text else None
    options = rank_options(source, method)
    options.check(method)
    known, statistic = moments, method.allocation.statistic
    if tokens and statistic and known is None:
        known = calibrate(source, tokens, statistics={statistic})
    measured = method.allocation.measure(DenseMeasures(source, method, options, known, tokens, None, gradients))
    allocated = allocate_ranks(options, method, measured)
    reports = {}
    if moments is not None:
        moments.check(source, statistics_of(source, method))
        shared = shared_of(source, method, moments)
        for index in track(range(len(source)), "predicting"):
            view = source.block(index)
            (stage,) = method.stages(view, of_block(allocated.ranks, index))
            result = decompose(stage, view, moments[index] | shared(index) | (gradients[index] if gradients else {}))
            reports |= {(index, module): report for module, report in result.reports.items()}
    calibration = tokens.describe() if tokens else moments.identity["tokens"] if moments else None
    return with_file(source, build_plan(source, method, allocated, reports, calibration), goal)


@timed_run()
def compress(
    source: DenseModel,
    method: Method,
    tokens: CalibrationData | None = None,
    output: str | Path | None = None,
    *,
    moments: MomentStore | None = None,
    mode: str = "sequential",
    on_plan: Callable[[Plan], None] | None = None,
    goal: Goal | None = None,
) -> CompressionResult:
    """Compress an open model; arguments as for :func:`rankfold.compress`, each in its final form.

    Args:
        goal: what the sparsity of the method was chosen for, for the record.
    """
    mode = check_request(method, tokens, moments, mode, output)
    identity = from_first(lambda: run_identity(validated(source), method, tokens, moments, mode))
    folder = RunFolder(output, identity) if output is not None else None
    with folder.working() if folder else contextlib.nullcontext():
        result = CompressionRun(source, method, tokens, moments, identity, folder, goal).carry_out(on_plan)
    if source.streamed or source.bytes_on_disk is None:  # not one that was read whole: it would stay in memory
        result.dense = source
    return result


def compress_once(
    source: DenseModel,
    method: Method,
    tokens: CalibrationData | None,
    output: Path | None,
    *,
    moments: MomentStore | None,
    mode: str,
    **others: Any,
) -> CompressionResult:
    """As :func:`compress`; what an earlier call with the same has finished in the folder is read back."""
    if output and from_first(
        lambda: RunFolder(output, run_identity(validated(source), method, tokens, moments, mode)).published
    ):
        return CompressionResult.of_folder(output, device=str(source.device))
    return compress(source, method, tokens, output, moments=moments, mode=mode, **others)


@dataclasses.dataclass
class CompressionRun:
    """One compression of an open model: measure, plan, compress every block, finish."""

    source: DenseModel
    method: Method
    tokens: CalibrationData | None
    moments: MomentStore | None  # in place of tokens
    identity: dict
    folder: RunFolder | None = None  # held by this process, perhaps with blocks of an earlier run
    goal: Goal | None = None

    @one_run()
    def carry_out(self, on_plan: Callable[[Plan], None] | None = None) -> CompressionResult:
        """Take all steps; what is planned is shown before a block is compressed."""
        folder = self.folder
        if folder and from_first(lambda: folder.complete):  # what an earlier process could not rename any more
            return CompressionResult.of_folder(from_first(folder.publish), device=str(self.source.device))
        if folder:
            folder.go_on_counting()
        self.measure()
        self.plan()
        if on_plan and is_first():
            on_plan(self.planned)
        self.compress_blocks()
        return self.finish()

    def measure(self) -> None:
        """Measure on the dense model what the allocation and the method go by: gradients, moments, scores.

        The ranks of an influence allocation are known only after the last block, so its one pass keeps all moments.
        """
        source, method, moments = self.source, self.method, self.moments
        self.options = rank_options(source, method, self.folder and self.folder.times)
        self.options.check(method)  # what cannot be reached is said at once
        self.gradients = gradients_of(source, method, self.tokens, self.folder)
        if moments is None and (first := of_dense(source, method)):
            statistics = needed(source, method) if self.identity["mode"] == "one-pass" else first
            moments = calibrate(
                source, present(self.tokens), self.folder and self.folder.moments, statistics=statistics
            )
        self.shared = shared_of(source, method, moments)
        known = DenseMeasures(source, method, self.options, moments, self.tokens, self.folder, self.gradients)
        self.measured = method.allocation.measure(known)
        if moments and self.identity["mode"] == "one-pass":
            if is_first():
                moments.check(source, statistics_of(source, method))
            self.moments = moments

    def plan(self) -> None:
        """Turn scores into a rank for every module of every block."""
        allocated = allocate_ranks(self.options, self.method, self.measured)
        for_stock = divergence_for_stock(self.source, self.method, self.measured)
        if for_stock is not None:
            allocated = allocated._replace(facts=allocated.facts | {"divergence_for_stock": for_stock})
        self.ranks = allocated.ranks
        planned = build_plan(self.source, self.method, allocated, {}, self.identity["calibration"])
        self.planned = with_file(self.source, planned, self.goal)

    def compress_blocks(self) -> None:
        """Compress one block after the other; a finished one of an earlier run is read back."""
        source, kept = self.source, kept_blocks(self.ranks, len(self.source))
        shards = self.identity["calibration"].get("shards", 1)
        unseen = (self.tokens or present(self.moments)).held_out
        inputs = dense_inputs(statistics_of(source, self.method))
        held_out = follow_held_out(source, unseen, self.identity["mode"], shards, inputs)
        self.context = RunContext(source, self.method, self._provider(), held_out, self.gradients, self.shared)
        self.probes = follow_probe_texts(source, shards)
        self.followers = [follower for follower in (self.context.provider, held_out, self.probes) if follower]
        self.writer = self._writer(kept)
        self.blocks: list[BlockResult] = []
        read, basis = BlockReader(source), None
        for index in track(range(len(source)), "compressing", note=held_out.so_far if held_out else str):
            block, basis = self._compress_block(read, index, basis)
            self.blocks.append(block)

    def _writer(self, kept: tuple[int, ...]) -> BlockWriter:
        if not is_first():
            return NoWriter(self.source, kept, self.folder and self.folder.output)
        return FolderWriter(self.source, self.folder, kept) if self.folder else MemoryWriter(self.source, kept)

    def _provider(self) -> MomentProvider:
        if self.moments:
            return StoredMoments(self.moments)
        return moment_provider(
            self.source, self.method, _start(self.source, present(self.tokens)), self.identity["mode"]
        )

    def _compress_block(self, read: BlockReader, index: int, basis: Tensor | None) -> tuple[BlockResult, Tensor | None]:
        """Measure, decompose, replace and keep one block, or take it from an earlier run; then move on.

        Args:
            basis: the coordinates in which the block before writes the stream.

        Returns:
            Descriptions by full path and what was measured, without tensors; and the coordinates in which this block
            writes the stream.
        """
        writer, is_kept = self.writer, index in self.writer.kept
        view = dataclasses.replace(read(index), basis=basis)
        release_memory()
        done = sent_by(0, writer.load(index))
        for follower in self.followers:
            follower.enter(view, skip=done is not None)
        if done is not None:
            view, result = replace(view, done, self.source), done
        else:
            view, result = run_stages(self.context, view, of_block(self.ranks, index))
            writer.keep(view, result)
        view = in_model_coordinates(view, result.basis) if is_kept else passing(view)
        release_memory()
        for follower in (writer, *self.followers):
            follower.follow(view)
        release_memory()
        modules = {writer.module_path(index, name): spec for name, spec in result.modules.items()} if is_kept else {}
        return BlockResult(modules, {}, result.reports), result.basis

    def finish(self) -> CompressionResult:
        """Write record, card and config, and put the model together; a folder is read back before it gets its name."""
        source, the_plan, folder, held_out = self.source, self.planned, self.folder, self.context.held_out
        can_exclude = self.method.can_exclude_blocks
        found = held_out.finish(the_plan.sparsity, can_exclude=can_exclude) if held_out else None
        description = {
            "rankfold_version": __version__,
            **self.identity,
            "counts": published_counts(the_plan),
            "held_out": found,
            "probe_texts": self.probes.finish(the_plan.sparsity),
        }
        if self.goal:
            description["goal"] = self.goal.outcome(the_plan, found)
        modules = {path: spec for block in self.blocks for path, spec in block.modules.items()}
        config = compressed_config(source, description, modules, self.writer.kept)
        reports = {str(index): block.reports for index, block in enumerate(self.blocks)}
        name, before = (folder.output.name, from_first(lambda: folder.earlier)) if folder else (source.name, None)
        record = run_record(source, description | ({"before": before} if before else {}), the_plan, reports)
        card = model_card(record, name, stock=described(config) is None, auto=auto_class_name(source.model))
        with together():
            return self.writer.finish(config, card, record, the_plan)


def check_request(method: Method, tokens, moments, mode: str, output) -> str:
    """Return the mode, once everything that can be checked without the model is."""
    mode = check_mode(method, mode, stored=moments is not None)
    if (tokens is None) == (moments is None):
        raise OptionError("give either calibration data or moments, not both and not neither")
    if output is not None:
        check_output(Path(output))
    return mode


def check_mode(method: Method, mode: str, *, stored: bool) -> str:
    """Return the mode a method runs in, with stored moments of the dense model or without.

    Raises:
        OptionError: there is no such mode, or not with this method.
    """
    if mode not in ("sequential", "one-pass"):
        raise OptionError(f"mode must be sequential or one-pass, got {mode!r}")
    mode = "one-pass" if stored else mode
    if mode not in method.modes:
        raise OptionError(
            f"method {method.name} measures every block on what the compressed ones before it send, so it takes text "
            f"and mode {method.modes[0]}, not moments or mode {mode}; or use {option('method', 'modegpt')}"
        )
    return mode


def _start(source: DenseModel, tokens: CalibrationData) -> Stream:
    check_fits(tokens.ids, source)
    say_if_few(tokens.ids, source)
    return start(source, tokens.ids, autocast=source.autocast, shards=tokens.shards, offload=source.offload)
