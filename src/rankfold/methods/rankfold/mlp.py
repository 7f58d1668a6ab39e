"""The MLP: its down projection corrected by what the stream lacks, then hidden units eliminated one after another.

Shape legend: F hidden width, R kept width, D model width.
"""

from ..._utils.present import present
from ..._utils.processes import Each
from ...architectures import BlockView
from ...linalg.nystrom import Nystrom
from ...linalg.psd import choosing
from ..base import BlockResult
from ..modegpt.experts import reduce_experts
from ..modegpt.mlp import reduce_mlp
from .remove_module import without_mlp
from .residual_correction import Repair, repair

NAMES = ("mlp_hidden", "mlp_feedback")


def decompose_mlp(method, view: BlockView, moments, held_out, ranks: dict[str, int], each: Each = map) -> BlockResult:
    """The MLP and the experts, where these are among the modules of ``ranks``."""
    result = BlockResult()
    if "mlp" in ranks:
        result = _decompose_mlp(method, view, moments, held_out, ranks["mlp"])
    if "experts" in ranks:
        reduce_experts(method, view, moments, ranks["experts"], result, each)
    return result


def _decompose_mlp(method, view: BlockView, moments, held_out, rank: int) -> BlockResult:
    """Units go by what they cost the corrected projection; the others take over their part of the correction too."""
    if rank == 0:
        return without_mlp(method, view, moments)
    result, down = BlockResult(), view.mlp.down
    if "mlp_feedback" not in moments or rank == view.mlp.hidden:
        reduce_mlp(method, view, down, moments, rank, result)
    elif (others := held_out()) is None:  # nothing could confirm a correction
        reduce_mlp(method, view, down, moments, rank, result)
        result.reports["mlp"]["residual_correction"] = 0.0
    else:
        better = repair(down, moments, others, NAMES, centred=method.bias_refit and down.bias is not None)
        fit = reduce_mlp(method, view, better.dense, moments, rank, result)
        result.reports["mlp"] |= better.report | {"missing_after": _missing(better, present(fit))}
    return result


def _missing(better: Repair, fit: Nystrom) -> float:
    """What is still missing on the held-out samples when the dropped units are gone."""
    W = better.dense.weight.new_zeros(better.dense.weight.shape, dtype=choosing(better.held_out.C))
    W[:, fit.keep] = fit.W_down.to(W.dtype)
    return better.held_out.relative_loss(W)
