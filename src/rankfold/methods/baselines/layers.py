"""Layers that have one input, each fitted by itself and stored."""

from collections.abc import Callable

from ...architectures import Dense
from ...calibration.moments import BlockMoments
from ..base import BlockResult
from ..latentllm.factor import Fit, Input, prepare
from ..latentllm.layout import INPUTS, Slot
from ..latentllm.report import Report
from ..latentllm.storing import store_all
from ..result import Latent
from .svd_family import SVDLLM

FitLayer = Callable[[Slot, Dense, Input, int], Fit]  # of how a layer is stored, the layer, its input and its rank


def by_input(ranks: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return statistic of an input -> ranks of the modules that have it, in the order of a block."""
    found = {name: {m: rank for m, rank in ranks.items() if INPUTS[m] == name} for name in INPUTS.values()}
    return {name: some for name, some in found.items() if some}


def fit_layers(
    result: BlockResult,
    method: SVDLLM,
    layout: dict[str, Slot],
    dense: dict[str, Dense],
    moments: BlockMoments,
    ranks: dict[str, int],
    statistic: str,
    fit: FitLayer,
) -> dict[str, Latent]:
    """Return, by module, the layers that lose rank, and put reports and errors into the result.

    Args:
        layout, dense: by module.
        ranks: of the modules that have this input.
        statistic: the input.
    """
    lower = {module: rank for module, rank in ranks.items() if rank < layout[module].full}
    full = {module: layout[module].full for module in ranks if module not in lower}
    result.reports.update({module: Report(rank, rank, "dense", 0.0).to_dict() for module, rank in full.items()})
    inputs = {c: prepare(method, moments, statistic, centred=c) for c in {method.refits_bias(dense[m]) for m in lower}}
    fits = {m: fit(layout[m], dense[m], inputs[method.refits_bias(dense[m])], rank) for m, rank in lower.items()}
    latents, reports, errors = store_all(layout, fits, dense, moments)
    result.reports.update({module: report.to_dict() for module, report in reports.items()})
    result.errors.update(errors)
    return latents
