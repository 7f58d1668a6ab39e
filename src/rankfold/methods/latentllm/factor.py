"""The best factors of one linear layer, before they are stored.

Shape legend: O outputs, N inputs, R latent width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...architectures import Dense
from ...calibration.moments import Moment
from ...linalg.lowrank import bias_update, low_rank, metric_error
from ...linalg.preconditioner import Preconditioner, preconditioner
from ...linalg.sparse import low_rank_plus_sparse
from .layout import QKV, Slot

__all__ = ["Fit", "Input", "local", "prepare"]


class Input(NamedTuple):
    """What several layers with the same input share: its metric and its pre-conditioner."""

    C: Tensor  # (N, N) moment the error is measured in
    mean: Tensor  # (N,)
    precond: Preconditioner
    centred: bool


class Fit(NamedTuple):
    """Unrounded factors of a projection, ``B A + D``, and what was measured."""

    B: Tensor  # (O, R); split heads: (H, h, R)
    A: Tensor  # (R, N); split heads: (H, R, N)
    bias: Tensor | None  # (O,)
    report: dict
    D: Tensor | None = None  # (O, N) sparse correction
    given: Input | None = None  # its input; None where the fit is not of this layer's own output
    target: Tensor | None = None  # (O, N) the weight, where it is needed: to quantise factors that fit its own output


def prepare(method, moment: Moment, *, centred: bool) -> Input:
    """Pre-conditioner of an input; ``centred`` for layers whose bias takes the mean (LatentLLM App. B.2)."""
    C = moment.covariance if centred else moment.C
    mean_abs = moment.mean_absolute if method.precondition == "l1" else None
    precond = preconditioner(C, method.precondition, ridge=method.ridge, alpha=method.alpha, mean_abs=mean_abs)
    return Input(C, moment.mean, precond, centred)


def local(slot: Slot, dense: Dense, given: Input, rank: int) -> Fit:
    """The best rank-R factors of one layer for its own output (LatentLLM Sec. 3.2, App. C for a stack, App. I)."""
    W, count = dense.weight.double(), slot.nonzeros(rank)
    report = {"rank": rank, "of": slot.full, "form": "local, one latent" if slot.name == QKV else "local"}
    if slot.split:
        fit = _by_head(slot, W, dense.bias, given, report)
    elif count:
        fit = _with_sparse(slot, W, dense.bias, given, count, report)
    else:
        factors = low_rank(W, given.precond, rank=rank, C=given.C)
        report["relative_error"] = factors.relative_error
        fit = Fit(factors.B, factors.A, _moved(W, factors[:2], dense.bias, given), report)
    return fit._replace(given=given, target=W if slot.method.bits else None)


def _with_sparse(slot: Slot, W: Tensor, bias: Tensor | None, given: Input, count: int, report: dict) -> Fit:
    """Low rank plus a sparse correction (App. I)."""
    method, rank = slot.method, report["rank"]
    fit = low_rank_plus_sparse(W, given.C, rank=rank, count=count, method=method.shrink, ridge=method.ridge)
    report |= {"form": f"{report['form']} + sparse", "nonzeros": count}
    report |= {"relative_error": fit.relative_error, "loss_history": fit.loss_history}
    return Fit(fit.B, fit.A, _moved(W - fit.D, fit[:2], bias, given), report, fit.D)


def _by_head(slot: Slot, W: Tensor, bias: Tensor | None, given: Input, report: dict) -> Fit:
    """A low rank of its own for every head (App. D)."""
    fits = [low_rank(head, given.precond, rank=report["rank"]) for head in W.unflatten(0, (slot.heads, -1))]
    B, A = torch.stack([fit.B for fit in fits]), torch.stack([fit.A for fit in fits])
    report |= {"form": "split heads", "relative_error": metric_error(W - (B @ A).flatten(0, 1), W, given.C)}
    return Fit(B, A, _moved(W, (torch.block_diag(*B), A.flatten(0, 1)), bias, given), report)


def _moved(W: Tensor, factors: tuple[Tensor, Tensor], bias: Tensor | None, given: Input) -> Tensor | None:
    """The bias that makes the layer right on average (App. B.2), where the fit counts on it."""
    if bias is None or not given.centred:
        return bias
    return bias_update(W, factors, given.mean, bias.double()).to(bias.dtype)
