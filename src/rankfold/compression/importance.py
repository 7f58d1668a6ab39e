"""What has to be known about the dense model before ranks can be chosen and blocks compressed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar, cast

from torch import Tensor

from .._utils.memory import release_memory
from .._utils.processes import from_first, is_first
from .._utils.progress import track
from ..allocation import RankCosts, shared_budgets
from ..architectures import BlockView
from ..calibration.backward import sweep, windows_for
from ..calibration.gradients import gradient_observers, widest
from ..calibration.moments import BlockMoments, moved
from ..calibration.providers import DenseMoments, HiddenStates, MomentProvider
from ..calibration.runner import Stream
from ..calibration.statistics import STATISTICS, dense_inputs
from ..calibration.store import MomentStore
from ..checkpoint.run import RunFolder
from ..data.calibration_data import CalibrationData
from ..errors import OptionError, UnsupportedModelError, command
from ..methods import BLOCK, MeasurableMethod, Method
from ..models.dense_model import DenseModel
from ..report.identity import moments_identity
from .block import algebra
from .block_loss import greedy_block_removal
from .budget import RankOptions
from .kl_divergence import measure_kl_sensitivity, read_costs, write_costs
from .plan import shares


def statistics_of(source: DenseModel, method: Method) -> set[str]:
    """Return the statistics that decomposing with this method reads."""
    return set().union(*map(method.statistics, source.meta_blocks()))


def moment_provider(source: DenseModel, method: Method, stream: Stream, mode: str) -> MomentProvider:
    """Return what measures the blocks of a compression, on a stream before the first one."""
    if mode == "one-pass":
        return DenseMoments(stream)
    statistics = statistics_of(source, method)
    two = any(STATISTICS[name].two_streams for name in statistics)
    return HiddenStates(stream, stream.copy() if two else None, dense_inputs(statistics))


def needed(source: DenseModel, method: Method) -> set[str]:
    """Return the statistics that planning and decomposing with this method read."""
    return statistics_of(source, method) | of_dense(source, method)


def of_dense(source: DenseModel, method: Method) -> set[str]:
    """Return the statistics of the whole dense model that must be known before a block is compressed."""
    statistic = method.allocation.statistic
    return _shared(source, method) | ({statistic} if statistic else set())


def _shared(source: DenseModel, method: Method) -> set[str]:
    return set().union(*map(method.shared, source.meta_blocks()))


def shared_of(source: DenseModel, method: Method, moments: MomentStore | None) -> Callable[[int], BlockMoments]:
    """Return a function that gives a block, by its number, what a method makes of all dense blocks together.

    That includes what it makes of the group of this block. A method that reads none is given nothing.

    Raises:
        CheckpointError: the moments lack what it reads.
    """
    wanted = _shared(source, method)
    if moments is None or not wanted or not is_first():
        return lambda index: {}
    moments.check(source, wanted)
    of_all = method.sum_up(moments[index] for index in range(len(source)))

    def member(index: int) -> tuple[BlockView, BlockMoments]:
        view = source.block(index)
        view = view.on_cpu() if view.device.type == "mps" else view  # which has no fp64
        known = moments[index]
        return view, moved({name: known[name] for name in wanted if name in known}, view.device)

    return lambda index: of_all | method.pool(member(other) for other in method.group(index, len(source)))


def available(source: DenseModel, statistics: set[str]) -> set[str]:
    """Leave out the statistics of parts that no block has, or that nothing could use."""
    blocks = source.meta_blocks()
    seen = {name for name in statistics if any(STATISTICS[name].seen_in(view) for view in blocks)}
    return seen - (set() if any(view.relu for view in blocks) else {"mlp_samples"})


T = TypeVar("T")


class DenseMeasures(NamedTuple):
    """The dense model, and what is known about it; :class:`rankfold.allocation.DenseModelMeasures`.

    Raises:
        OptionError: there is no text, or there are no moments that hold what an allocation reads.
    """

    source: DenseModel
    method: Method
    options: RankOptions
    moments: MomentStore | None = None
    tokens: CalibrationData | None = None
    run: RunFolder | None = None
    gradients: MomentStore | None = None

    def means(self, statistic: str) -> dict[int, Tensor]:
        if self.moments is None or statistic not in self.moments.identity["statistics"]:
            raise OptionError(
                f"allocation {self.method.allocation.name} goes by the statistic {statistic!r} of the dense model, and "
                f"there are no moments that hold it; measure them with {command('calibrate')}, or give calibration text"
            )
        moments = self.moments
        return from_first(lambda: {index: moments[index][statistic].mean for index in range(len(self.source))})

    def of_blocks(self, score: Callable[[BlockView], float]) -> dict[int, float]:
        """Compute a number of every block; one block is resident."""
        return from_first(lambda: {index: self._of_block(index, score) for index in self._blocks()})

    def _blocks(self) -> Iterator[int]:
        return track(range(len(self.source)), "looking at weights")

    def _of_block(self, index: int, score: Callable[[BlockView], T]) -> T:
        with algebra(self.source.block(index)) as view:
            found = score(view)
        release_memory()
        return found

    def kl_sensitivity(self, other_texts: float) -> RankCosts:
        """Measure what every rank would cost; kept with the run, so that a resumed run finds the same ranks."""
        tokens, known = self._text(), self._known()
        if known:
            return known
        method = cast("MeasurableMethod", self.method)  # which all methods that take this allocation are
        ranks = shares(self.options, method)
        found = measure_kl_sensitivity(self.source, method, tokens, *ranks, self.gradients, other_texts=other_texts)
        self._keep(found)
        return found

    def greedy_block_removal(self) -> RankCosts:
        """Search block by block; what is found is kept with the run whenever there is more."""
        tokens = self._text()
        _check_predicts(self.source, "losses without a block are those")
        (share,) = shared_budgets(self.options.priced, self.method, self.options.counted)
        sizes = {unit.block: unit.dense for unit in share.modules if len(unit.ranks) > 1}
        stay = {(unit.block, BLOCK): {1: 0.0} for unit in share.modules if unit.block not in sizes}
        return greedy_block_removal(self.source, tokens.ids, sizes, share.remove, self._known(), self._keep) | stay

    def singular_value_effects(self) -> dict[tuple[int, str], list[float]]:
        """Measure by moments and gradients what each singular value does to the loss; one block is resident."""
        moments = self.moments
        gradients = self.gradients or gradients_of(self.source, self.method, self.tokens, self.run)
        if moments is None or gradients is None:
            raise OptionError(
                f"allocation {self.method.allocation.name} goes by moments and gradients of the dense model, and there "
                "are none; give calibration text"
            )

        def effects(index: int) -> dict[str, list[float]]:
            return self._of_block(
                index, lambda view: self.method.singular_value_effects(view, moments[index] | gradients[index])
            )

        found = from_first(lambda: {index: effects(index) for index in self._blocks()})
        return {(index, module): changes for index, some in found.items() for module, changes in some.items()}

    def _text(self) -> CalibrationData:
        if self.tokens is None:
            raise OptionError(
                f"a {self.method.allocation.name} allocation compares predictions on text, which moments do not hold; "
                "give calibration text, or take another allocation or method"
            )
        return self.tokens

    def _known(self) -> RankCosts:
        run = self.run
        return from_first(lambda: read_costs(run.costs) if run and run.costs.exists() else {})

    def _keep(self, found: RankCosts) -> None:
        if self.run and is_first():
            write_costs(self.run.costs, found)


def gradients_of(
    source: DenseModel, method: Method, tokens: CalibrationData | None, run: RunFolder | None = None
) -> MomentStore | None:
    """Measure what a method reads of one backward pass through the dense model; kept with the run while it lasts.

    Where several processes share the calibration set, the first one has the gradients; in the others they are empty.

    Raises:
        OptionError: there is no text.
        UnsupportedModelError: an encoder, which has no loss of its own.
    """
    views = source.meta_blocks()
    names = [method.gradients(view) for view in views]  # blocks may differ in kind
    if not any(names):
        return None
    _check_predicts(source, "gradients are those")
    if tokens is None:
        raise OptionError(
            "gradients are measured on text, which moments do not hold; give calibration text, or take a method or "
            "option that reads no gradients"
        )
    length = tokens.tokens // len(tokens.ids)
    outputs = max(map(widest, views, names))
    some = replace(tokens, ids=tokens.ids[: windows_for(len(tokens.ids), length, outputs)])
    identity = from_first(lambda: moments_identity(source, some, set().union(*names)))
    with MomentStore.filling(identity, run.gradients if run and is_first() else None) as store:
        missing = from_first(lambda: store.missing(len(source)))
        if missing:
            observers = [gradient_observers(wanted) for wanted in names]
            each = sweep(source, some.ids, lambda view: observers[view.index](view), min(missing), tokens.shards)
            for index, moments in each:
                if index in missing:
                    store[index] = moments
                del moments  # those of the next block come beside nothing
    return store


def _check_predicts(source: DenseModel, what: str) -> None:
    """Raise :class:`UnsupportedModelError` for an encoder, which has no loss of its own."""
    if not source.architecture.decoder:
        raise UnsupportedModelError(
            f"{what} of the next-token loss, and {source.architecture.model_type} predicts no next token; take another "
            "method or allocation, one that reads no loss"
        )
