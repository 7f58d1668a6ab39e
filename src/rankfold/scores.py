"""What has to be known about the dense model before ranks can be chosen and blocks compressed."""

from .calibration.store import MomentStore
from .calibration.tokens import Tokens
from .checkpoint.run import Run
from .checkpoint.source import Source
from .effects import Costs, measure_costs, read_costs, write_costs
from .errors import OptionError
from .methods import Method
from .planning import shares

__all__ = ["available", "needed", "scores_of", "statistics_of"]


def statistics_of(source: Source, method: Method) -> set[str]:
    """Statistics that decomposing with this method reads."""
    return method.statistics(source.meta_block(0))


def needed(source: Source, method: Method) -> set[str]:
    """Statistics that planning and decomposing with this method read."""
    return statistics_of(source, method) | ({"influence"} if "influence" in method.allocation else set())


def available(source: Source, statistics: set[str]) -> set[str]:
    """Without the statistics of an MLP that the architecture does not show, or that nothing could use."""
    hidden = {"mlp_input", "mlp_hidden"} if source.architecture.mlp is None else set()
    return statistics - hidden - (set() if source.meta_block(0).relu else {"mlp_samples"})


def scores_of(
    source: Source,
    method: Method,
    moments: MomentStore | None = None,
    tokens: Tokens | None = None,
    run: Run | None = None,
):
    """What the allocation of a method goes by.

    Returns:
        ``None`` where it is uniform; costs (:mod:`.effects`) where it is measured; else block -> influence of the block, of its
        attention, of its MLP.
    """
    if method.allocation == "uniform":
        return None
    if method.allocation == "measured":
        return _costs(source, method, tokens, run)
    if moments is None or "influence" not in moments.identity["statistics"]:
        raise OptionError("an influence allocation needs moments with influence scores; run `rankfold calibrate`")
    return {i: tuple(moments[i]["influence"].mean.tolist()) for i in range(len(source))}


def _costs(source: Source, method: Method, tokens: Tokens | None, run: Run | None) -> Costs:
    """What every rank would cost; kept with the run, so that going on finds the same ranks."""
    if tokens is None:
        raise OptionError(
            "a measured allocation compares predictions on text, which moments do not hold; give calibration text, or take "
            "another allocation"
        )
    if run and run.costs.exists():
        return read_costs(run.costs)
    found = measure_costs(source, method, tokens, *shares(source, method))
    if run:
        write_costs(run.costs, found)
    return found
