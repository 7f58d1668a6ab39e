"""Type I in a block: slice up and gate, refit down.

Shape legend: D model width, F hidden width, R kept width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..._utils.present import present
from ...architectures import BlockView, Dense
from ...calibration.moments import Moment
from ...linalg.elimination import others
from ...linalg.nystrom import Nystrom, nystrom
from ...linalg.psd import energy, relative
from ..base import BlockResult
from ..result import put_projection
from .output_weighting import output_root, predicted_loss

GRADIENT = "down_gradient"
ORDER = "mlp_unit_order"  # beside the moments of a block whose curve is known


@dataclass
class UnitOrder:
    """The order in which elimination removes the hidden units of an MLP; a curve finds it, and a fit need not again."""

    removed: Tensor  # (F - least,)

    def keep(self, rank: int, full: int) -> Tensor:
        """Return the ``(rank,)`` units that stay, ascending."""
        return others(self.removed[: full - rank], full).nonzero()[:, 0]


def reduce_mlp(method, view: BlockView, down: Dense, moments, rank: int, result: BlockResult) -> Nystrom | None:
    """Algorithm 1; with a bias on the down projection, on the covariance, the mean moved into the bias.

    Args:
        down: the projection to stand for; the block's own, or a better one.

    Returns:
        The fit; ``None`` where all units stay.
    """
    mlp = view.mlp
    full = mlp.hidden
    if rank == full:
        result.reports["mlp"] = {"rank": full, "of": full, "relative_error": 0.0}
        return None
    C, scale, centre = metric_of(method, down, moments["mlp_hidden"])
    fit = nystrom(
        down.weight,
        C,
        rank=rank,
        ridge=relative_ridge(method, C, moments["mlp_hidden"].count / scale),
        selection=method.selection,
        output_root=output_root(moments, GRADIENT),
        keep=moments[ORDER].keep(rank, full) if ORDER in moments else None,
    )
    predicted = {}
    if GRADIENT in moments:
        predicted["predicted_loss"] = predicted_loss(moments[GRADIENT], gap_of(down.weight, fit), C) / scale
    del C
    for path, projection in mlp.rising().items():
        put_projection(result, path, projection.rows(mlp.rows_of(fit.keep)))
    put_projection(result, mlp.spec.down, refitted(down, fit, centre, mlp.down.weight.dtype))
    result.errors["mlp"] = lambda other: output_error(down.weight, fit, centre, other["mlp_hidden"])
    result.reports["mlp"] = predicted | {
        "rank": rank,
        "of": full,
        "selection": method.selection,
        "relative_error": fit.relative_error,
        "error": fit.error / scale,
        "clamped": fit.clamped,
    }
    if fit.bounds is not None:
        theorem, proposition, epsilon = fit.bounds
        result.reports["mlp"] |= {
            "theorem_1": theorem / scale,
            "proposition_1": None if proposition is None else proposition / scale,
            "epsilon": epsilon,
        }
    return fit


def metric_of(method, down: Dense, moment: Moment) -> tuple[Tensor, float, Tensor | None]:
    """What a down projection is fitted in.

    Returns:
        ``C`` ``(F, F)``, fp64: the covariance where a bias takes the mean, else the sum of products, which needs no
        copy; what a squared error under ``C`` is to be divided by; the mean ``(F,)`` where a bias takes it.
    """
    if method.bias_refit and down.bias is not None:
        return moment.covariance(), 1.0, moment.mean
    return moment.second.double(), moment.count, None


def relative_ridge(method, C: Tensor, samples: float) -> float:
    """Return the damping as a fraction of the mean diagonal of ``C``; ``C`` times ``samples`` is a sum over tokens."""
    if method.ridge_scale == "relative":
        return method.ridge
    return (method.ridge / (samples * C.diagonal().mean())).item()


def refitted(down: Dense, fit: Nystrom, centre: Tensor | None, dtype: torch.dtype) -> Dense:
    """The projection on the units that stay; its bias has what the others send at their mean ``centre``."""
    bias = down.bias
    if centre is not None:
        bias = present(bias).double() + down.weight.double() @ centre - fit.W_down.double() @ centre[fit.keep]
    return Dense(fit.W_down.to(dtype), None if bias is None else bias.to(dtype))


def output_error(W: Tensor, fit: Nystrom, centre: Tensor | None, moment: Moment) -> float:
    """RMS error of the MLP's output over its RMS on activations of this moment, about the mean that went into its bias.

    Args:
        W: ``(D, F)`` dense down projection.
        centre: ``(F,)`` mean of the fit, where the bias took it.
    """
    C = moment.second if centre is None else moment.about(centre)
    error, total = torch.stack([energy(M, C) for M in (gap_of(W, fit), W.float())]).tolist()  # fp32 is enough
    return relative(error, total)


def gap_of(W: Tensor, fit: Nystrom) -> Tensor:
    """``(D, F)`` the dense projection minus the one on the kept units; fp32."""
    gap = W.float().clone()
    gap[:, fit.keep] -= fit.W_down.float()
    return gap
