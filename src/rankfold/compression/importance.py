"""What has to be known about the dense model before ranks can be chosen and blocks compressed."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from .._utils.memory import release_memory
from .._utils.progress import track
from ..allocation import effective_rank, outlier_fraction
from ..architectures import BlockView
from ..calibration.backward import sweep, windows_for
from ..calibration.gradients import gradient_observers, widest
from ..calibration.moments import BlockMoments
from ..calibration.providers import DenseMoments, HiddenStates, MomentProvider
from ..calibration.runner import Stream
from ..calibration.statistics import STATISTICS
from ..calibration.store import MomentStore
from ..checkpoint.run import RunFolder
from ..data.calibration_data import CalibrationData
from ..errors import OptionError, UnsupportedModelError
from ..methods import BLOCK, Method
from ..models.dense_model import DenseModel
from ..report.identity import moments_identity
from .block import algebra
from .block_loss import removal_order
from .budget import Choices
from .kl_divergence import Costs, measure_costs, read_costs, write_costs
from .plan import budget, shares

__all__ = [
    "ON_DENSE",
    "ON_TEXT",
    "available",
    "gradients_of",
    "moment_provider",
    "needed",
    "needs_text",
    "of_dense",
    "scores_of",
    "shared_of",
    "statistics_of",
]

ON_TEXT = ("measured", "greedy")  # allocations that compare predictions, for which there must be text
# Allocation -> the statistic of the dense model it goes by.
ON_DENSE = {
    "influence": "influence",
    "influence-modules": "influence",
    "least-influence": "influence",
    "owl": "input_energy",
}


def statistics_of(source: DenseModel, method: Method) -> set[str]:
    """Statistics that decomposing with this method reads."""
    return set().union(*(method.statistics(source.meta_block(i)) for i in range(len(source))))  # layers differ in kind


def moment_provider(source: DenseModel, method: Method, stream: Stream, mode: str) -> MomentProvider:
    """Return what measures the blocks of a compression, on a stream in front of the first one."""
    if mode == "one-pass":
        return DenseMoments(stream)
    two = any(STATISTICS[name].two_streams for name in statistics_of(source, method))
    return HiddenStates(stream, stream.copy() if two else None)


def needed(source: DenseModel, method: Method) -> set[str]:
    """Statistics that planning and decomposing with this method read."""
    return statistics_of(source, method) | of_dense(source, method)


def needs_text(method: Method) -> bool:
    """Tell whether planning with this method reads text itself, which moments do not hold."""
    return method.allocation in ON_TEXT


def of_dense(source: DenseModel, method: Method) -> set[str]:
    """Statistics of the whole dense model that must be known before a block is compressed."""
    return _shared(source, method) | {s for a, s in ON_DENSE.items() if a == method.allocation}


def _shared(source: DenseModel, method: Method) -> set[str]:
    return set().union(*(method.shared(source.meta_block(i)) for i in range(len(source))))


def shared_of(source: DenseModel, method: Method, moments: MomentStore | None) -> BlockMoments:
    """What a method makes of all blocks of the dense model together; nothing where it reads none.

    Raises:
        CheckpointError: the moments lack what it reads.
    """
    wanted = _shared(source, method)
    if moments is None or not wanted:
        return {}
    moments.check(source, wanted)
    return method.sum_up(moments[index] for index in range(len(source)))


def available(source: DenseModel, statistics: set[str]) -> set[str]:
    """Without the statistics of parts that no block has, or that nothing could use."""
    blocks = [source.meta_block(i) for i in range(len(source))]  # layers differ in kind
    seen = {name for name in statistics if any(STATISTICS[name].seen_in(view) for view in blocks)}
    return seen - (set() if any(view.relu for view in blocks) else {"mlp_samples"})


def scores_of(
    source: DenseModel,
    method: Method,
    choices: Choices,
    moments: MomentStore | None = None,
    tokens: CalibrationData | None = None,
    run: RunFolder | None = None,
    gradients: MomentStore | None = None,
):
    """What the allocation of a method goes by.

    Returns:
        ``None`` where it is uniform; costs where ranks are chosen by them (:mod:`.kl_divergence`, :mod:`.block_loss`, influence
        of blocks that may go); block -> share of outliers or effective rank, where it goes by these; else block -> influence of
        the block, of its attention, of its MLP.
    """
    if method.allocation == "uniform":
        return None
    if method.allocation in ON_TEXT:
        return _costs(source, method, choices, tokens, run, gradients)
    if method.allocation == "spectrum":
        return _of_blocks(
            source, lambda view: effective_rank([W for p in view.readers.values() for W in view.weights(p)])
        )
    if moments is None or ON_DENSE[method.allocation] not in moments.identity["statistics"]:
        raise OptionError(
            f"allocation {method.allocation} goes by the statistic {ON_DENSE[method.allocation]!r} of the dense model, and "
            "there are no moments that hold it; run `rankfold calibrate`, or give calibration text"
        )
    if method.allocation == "owl":
        return _of_blocks(
            source, lambda view: _outliers(view, moments[view.index]["input_energy"].mean, method.outlier)
        )
    influence = {i: tuple(moments[i]["influence"].mean.tolist()) for i in range(len(source))}
    if method.allocation == "least-influence":
        return {(i, BLOCK): {0: of_block, 1: 0.0} for i, (of_block, _, _) in influence.items()}
    return influence


def _of_blocks(source: DenseModel, score: Callable[[BlockView], float]) -> dict[int, float]:
    """Block -> what its weights are; one block is resident."""
    found = {}
    for index in track(range(len(source)), "looking at weights"):
        with algebra(source.block(index)) as view:
            found[index] = score(view)
        release_memory()
    return found


def _outliers(view: BlockView, energies: Tensor, factor: float) -> float:
    """Share of outliers; ``energies`` are of the inputs of all readers, one behind the other."""
    weights = [view.weights(paths) for paths in view.readers.values()]
    inputs = energies.to(view.device).split([some[0].shape[1] for some in weights])
    pairs = [(W, x) for some, x in zip(weights, inputs, strict=True) for W in some]
    return outlier_fraction(*zip(*pairs, strict=True), factor)


def gradients_of(
    source: DenseModel, method: Method, tokens: CalibrationData | None, run: RunFolder | None = None
) -> MomentStore | None:
    """Statistics of one backward pass through the dense model, where the method reads any; kept with the run while it lasts.

    Raises:
        OptionError: there is no text.
        UnsupportedModelError: an encoder, which has no loss of its own.
    """
    view = source.meta_block(0)
    names = method.gradients(view)
    if not names:
        return None
    _check_predicts(source, "gradients are those")
    if tokens is None:
        raise OptionError(
            "gradients are measured on text, which moments do not hold; give calibration text, or take a method or option that "
            "reads no gradients"
        )
    length = tokens.tokens // len(tokens.ids)
    some = replace(tokens, ids=tokens.ids[: windows_for(len(tokens.ids), length, widest(view, names))])
    with MomentStore.filling(moments_identity(source, some, names), run.gradients if run else None) as store:
        missing = store.missing(len(source))
        if missing:
            for index, moments in sweep(source, some.ids, gradient_observers(names), min(missing)):
                if index in missing:
                    store[index] = moments
    return store


def _check_predicts(source: DenseModel, what: str) -> None:
    """Raise :class:`UnsupportedModelError` for an encoder, which has no loss of its own."""
    if not source.architecture.decoder:
        raise UnsupportedModelError(
            f"{what} of the next-token loss, and {source.architecture.model_type} predicts no next token; take another method "
            "or allocation, one that reads no loss"
        )


def _costs(
    source: DenseModel,
    method: Method,
    choices: Choices,
    tokens: CalibrationData | None,
    run: RunFolder | None,
    gradients,
) -> Costs:
    """What every rank would cost; kept with the run, so that going on finds the same ranks."""
    if tokens is None:
        raise OptionError(
            f"a {method.allocation} allocation compares predictions on text, which moments do not hold; give calibration text, "
            "or take another allocation or method"
        )
    known = read_costs(run.costs) if run and run.costs.exists() else {}
    if method.allocation == "greedy":
        _check_predicts(source, "losses without a block are those")
        units, remove = budget(choices, method)
        sizes = {unit.block: unit.dense for unit in units if len(unit.ranks) > 1}
        stay = {(unit.block, BLOCK): {1: 0.0} for unit in units if unit.block not in sizes}
        keep = (lambda found: write_costs(run.costs, found)) if run else (lambda _: None)
        return removal_order(source, tokens.ids, sizes, remove, known, keep) | stay
    if known:
        return known
    found = measure_costs(source, method, tokens, *shares(choices, method), gradients)
    if run:
        write_costs(run.costs, found)
    return found
