"""The largest saving that keeps a quality: predict, compress, measure on held-out text, correct, and compress once
more.

    curves of the dense model ---> sparsity ---> OUT.search/Q/SPARSITY/OUT ---> likelihood kept ---> corrected sparsity
    ---> ...
                                                          |
                                    the smallest that keeps enough ---> OUT

Every run is one of :func:`rankfold.compress` at a sparsity, so the result is what that call would give. A killed search
goes on with the run in which it was; what earlier ones wrote stays until the end.
"""

import contextlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from . import pipeline
from ._utils.files import check_output, make_folder, sync_folder, write_json, writing
from ._utils.locking import lock_of, locked
from ._utils.present import present
from ._utils.processes import from_first, is_first, on_first
from .allocation import LEAST, Lost, Measured, RankCosts, expected_loss, guessed_loss, next_sparsity
from .calibration.store import MomentStore
from .compression.budget import RankOptions, rank_options
from .compression.importance import DenseMeasures, gradients_of, needed
from .compression.plan import allocate_ranks
from .compression.result import CompressionResult
from .compression.validate_spec import validated
from .data.calibration_data import CalibrationData
from .errors import DataError, OptionError, UnsupportedModelError, option
from .methods import Method
from .models.dense_model import DenseModel
from .report.goal import Goal, check_quality, kept_quality
from .report.plan import Plan
from .report.record import NAME

MEASURED_AT = 0.3  # sparsity at which modules are tried for the curves; they reach 1 - (1 - 0.3)^3 = 0.66

OnPlan = Callable[[Plan], None]


def compress_to_keep(
    source: DenseModel,
    method: Method,
    keep_quality: float,
    tokens: CalibrationData | None = None,
    output: str | Path | None = None,
    *,
    moments: MomentStore | None = None,
    mode: str = "sequential",
    on_plan: OnPlan | None = None,
    on_run: Callable[[str], None] | None = None,
) -> CompressionResult:
    """Compress an open model by the largest sparsity that keeps a fraction of the likelihood of a held-out token.

    The fraction is ``exp(mean log-likelihood)`` of the compressed model over that of the dense one, which is the dense
    model's perplexity over the compressed one's.

    Args:
        source, method, tokens, output, moments, mode, on_plan: as for :func:`rankfold.pipeline.compress`; the sparsity
            of the method is not used. Several results lie beside ``output`` until the end.
        keep_quality: that fraction, in (0, 1).
        on_run: called with a line on each run when it is done.

    Returns:
        The result of the run with the largest sparsity of those that keep it.

    Raises:
        OptionError: no run keeps it, or ``keep_quality`` is out of range or does not go with the method.
        DataError: the calibration set has no held-out samples.
        UnsupportedModelError: an encoder, which predicts no tokens.
        RankfoldError: as :func:`rankfold.compress`.

    Cost: one run where the prediction is near, two as a rule, four at most; each a whole compression.
    """
    mode = pipeline.check_request(method, tokens, moments, mode, output)
    allowed = _allowed_loss(source, method, keep_quality, tokens, moments)
    place = _Places(Path(output), keep_quality) if output is not None else None
    with place.working() if place else contextlib.nullcontext():
        begin = time.perf_counter()
        curve = loss_curve(validated(source), method, tokens, moments)
        tokens, moments = _measured_once(source, method, tokens, moments, mode)
        seconds = time.perf_counter() - begin
        runs: list[Lost] = []
        earlier: list[dict[str, float]] = []
        kept: CompressionResult | None = None
        while (sparsity := next_sparsity(curve, runs, allowed)) is not None:
            predicted = math.exp(-expected_loss(curve, runs, sparsity)) if curve.costs or runs else None
            asked = Goal("keep_quality", keep_quality, predicted, tuple(earlier))
            folder = place.of_run(sparsity) if place else None
            how: dict[str, Any] = {"moments": moments, "mode": mode, "on_plan": on_plan, "goal": asked}
            result = pipeline.compress_once(source, replace(method, sparsity=sparsity), tokens, folder, **how)
            got = kept_quality(result.record["held_out"])
            seconds += result.record["run"]["seconds"]["total"]  # also of one that an earlier search did
            runs.append(Lost(sparsity, -math.log(got)))
            earlier.append({"sparsity": sparsity, "got": got})
            if got >= keep_quality and all(run.sparsity <= sparsity for run in runs if run.is_within(allowed)):
                kept = result
            if on_run:
                on_run(f"run {len(runs)}: sparsity {sparsity:g} keeps {got:.4f}, asked {keep_quality:g}")
        if kept is None:
            if place:
                on_first(place.clear)
            tried = ", ".join(f"{run['got']:.4f} at {run['sparsity']:g}" for run in earlier)
            raise OptionError(
                f"{option('keep_quality', keep_quality)} is not kept at any sparsity from {LEAST} on that was tried "
                f"({tried}); give a lower one, more calibration samples, or another method"
            )
        goal = kept.record["goal"]
        goal |= {"later_runs": earlier[len(goal["earlier_runs"]) + 1 :], "search_seconds": seconds}
        if place:
            written = present(kept.output)
            on_first(lambda: write_json(written / NAME, kept.record))
            kept.output = from_first(lambda: place.publish(written))
        return kept


def method_to_keep(
    source: DenseModel,
    method: Method,
    keep_quality: float,
    tokens: CalibrationData | None = None,
    moments: MomentStore | None = None,
) -> Method:
    """Return a method with the sparsity that the first run of :func:`compress_to_keep` takes.

    Raises:
        OptionError: the allocation measures no curves to predict it by.
    """
    if not isinstance(method.allocation, Measured):
        raise OptionError(
            f"the sparsity for {option('keep_quality', keep_quality)} is predicted on the curves of allocation "
            f"measured, got {method.allocation}; compress, which finds it by trying, "
            f"or take {option('method', 'rankfold')}"
        )
    allowed = _allowed_loss(source, method, keep_quality, tokens, moments)
    curve = loss_curve(validated(source), method, tokens, moments)
    return replace(method, sparsity=present(next_sparsity(curve, [], allowed)))


class LossCurve:
    """The loss to expect at each sparsity, in nats per token; of a measured allocation the sum of its costs.

    Args:
        method: what is done, at any sparsity.
        options: the ranks there are.
        costs: (block, module) -> rank -> divergence of the predictions with that module alone at that rank. Without
            them, and where they end, :func:`.guessed_loss` takes their place.
    """

    def __init__(self, method: Method, options: RankOptions, costs: RankCosts | None):
        self.method, self.options, self.costs = method, options, costs
        self._known: dict[float, float] = {}

    def __call__(self, sparsity: float) -> float:
        """Return the expected loss; infinite where the modules cannot lose so much."""
        if sparsity not in self._known:
            self._known[sparsity] = self._compute(sparsity)
        return self._known[sparsity]

    def _compute(self, sparsity: float) -> float:
        try:
            self.options.check(replace(self.method, sparsity=sparsity))
        except OptionError:
            return math.inf
        found = self._added_up(sparsity)
        return self._scale * guessed_loss(sparsity) if found is None else found

    def _added_up(self, sparsity: float) -> float | None:
        """Return the sum of the least costs; ``None`` without any, and behind their end."""
        if self.costs is None:
            return None
        with contextlib.suppress(OptionError):
            ranks = allocate_ranks(self.options, replace(self.method, sparsity=sparsity), self.costs).ranks
            return sum(self.costs[key][rank] for key, rank in ranks.items() if key in self.costs)
        return None

    @cached_property
    def _scale(self) -> float:
        """Return what the costs are of the guess where they end; 1 without any."""
        for percent in range(99, 0, -1):
            if (found := self._added_up(percent / 100)) is not None:
                return found / guessed_loss(percent / 100)
        return 1.0


def loss_curve(
    source: DenseModel, method: Method, tokens: CalibrationData | None, moments: MomentStore | None = None
) -> LossCurve:
    """Measure what a method is expected to lose at each sparsity; without a measured allocation it is a guess."""
    options = rank_options(source, method)
    if not isinstance(method.allocation, Measured):
        return LossCurve(method, options, None)
    method = replace(method, sparsity=MEASURED_AT)
    gradients = gradients_of(source, method, tokens)
    dense = DenseMeasures(source, method, options, moments, tokens, None, gradients)
    return LossCurve(method, options, method.allocation.measure(dense))


class _Places:
    """Where the runs of a search lie until the end: ``OUT.search/QUALITY/SPARSITY/OUT``."""

    def __init__(self, output: Path, keep_quality: float):
        self.output, self.folder = output, output.with_name(f"{output.name}.search")
        self.runs = self.folder / str(keep_quality)  # a record says what was asked for

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Keep the output to this process, whose end removes the runs of every search for it.

        Raises:
            CheckpointError: the output exists, or another process writes it.
        """
        if not is_first():
            yield
            return
        with locked(lock_of(self.output), self.output):
            check_output(self.output)
            yield

    def of_run(self, sparsity: float) -> Path:
        """Return the output of a run, in a folder that is there."""
        folder = self.runs / f"{sparsity:g}"
        on_first(lambda: make_folder(folder))
        return folder / self.output.name

    def publish(self, kept: Path) -> Path:
        """Give the run that is kept its name, and remove the others."""
        check_output(self.output)
        with writing(self.output):
            os.rename(kept, self.output)
            sync_folder(self.output.resolve().parent)
        self.clear()
        return self.output

    def clear(self) -> None:
        """Remove all runs."""
        with writing(self.folder):
            shutil.rmtree(self.folder)


def _allowed_loss(
    source: DenseModel, method: Method, keep_quality: float, tokens: CalibrationData | None, moments: MomentStore | None
) -> float:
    """Return the nats per token that may be lost."""
    asked = option("keep_quality", keep_quality)
    check_quality(keep_quality)
    if method.own_sparsities:
        raise OptionError(f"{asked} chooses one sparsity, and modules have their own here; name the modules only")
    if not source.architecture.decoder:
        raise UnsupportedModelError(
            f"{asked} is of the likelihood of tokens, and {source.architecture.model_type} predicts none; give "
            f"{option('sparsity')}"
        )
    if (tokens or present(moments)).held_out is None:
        raise DataError(f"{asked} is measured on held-out calibration samples, and there are none; give more samples")
    return -math.log(keep_quality)


def _measured_once(
    source: DenseModel, method: Method, tokens: CalibrationData | None, moments: MomentStore | None, mode: str
) -> tuple[CalibrationData | None, MomentStore | None]:
    """Measure the moments that all runs read, where these are the dense model's and nothing else reads the text."""
    if (
        tokens is None
        or mode != "one-pass"
        or method.allocation.needs_text
        or any(map(method.gradients, source.meta_blocks()))
    ):
        return tokens, moments
    return None, pipeline.calibrate(source, tokens, statistics=needed(source, method))
