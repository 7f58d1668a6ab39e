"""What every rank of a module would cost, from the statistics of the dense block."""

from ...architectures import BlockView
from ...linalg.nystrom import error_curve
from ..base import Curve, PrunableModule
from .attention import compress_qk, compress_vo
from .experts import expert_errors
from .mlp import GRADIENT as MLP
from .mlp import ORDER, UnitOrder, metric_of, relative_ridge
from .output_weighting import output_root, weighted


def squared_errors(method, view: BlockView, moments, unit: PrunableModule, least: int, vo=compress_vo) -> Curve:
    """Compute the squared relative error of a module at the ranks of ``unit`` from ``least`` on.

    In the output metric where the moments hold a gradient: the fit makes that least. ``vo`` reduces value and output.
    """
    if unit.module == "experts":
        return Curve(expert_errors(method, view, moments, unit, least))
    full = unit.ranks[-1]
    ranks = [rank for rank in unit.ranks if rank >= least]
    if unit.module == "mlp":
        down, moment = view.mlp.down, moments["mlp_hidden"]
        C, scale, _ = metric_of(method, down, moment)
        W = weighted(output_root(moments, MLP), down.weight.to(C))
        ridge = relative_ridge(method, C, moment.count / scale)
        curve = error_curve(W, C, least=ranks[0], ridge=ridge, selection=method.selection)
        found = {} if curve.removed is None else {ORDER: UnitOrder(curve.removed)}
        return Curve({rank: curve.errors[full - rank].item() for rank in ranks}, found)
    attention = view.attention
    q, k, v = attention.qkv()
    dense = {"q": q, "k": k, "v": v, "o": attention.output}
    compress = compress_qk if unit.module == "qk" else vo
    at = compress(method, attention, moments, dense)
    return Curve({rank: _counted(at(rank).report) ** 2 for rank in ranks if rank < full} | {full: 0.0})


def _counted(report: dict) -> float:
    """The error that knows most of what the module does."""
    names = ("weighted_error", "expected_error", "relative_error")
    return next(report[name] for name in names if name in report)
