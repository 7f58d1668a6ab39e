"""One linear layer as a latent one.

Shape legend: O outputs, N inputs, R latent width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...architectures import Dense
from ...calibration.moments import Moment
from ...linalg.junction import apply_junction
from ...linalg.lowrank import Preconditioner, bias_update, low_rank, preconditioner
from ..result import Latent

__all__ = ["Input", "latent_of", "local", "prepare"]


class Input(NamedTuple):
    """What several layers with the same input share: its metric and its pre-conditioner."""

    C: Tensor  # (N, N) moment the error is measured in
    mean: Tensor  # (N,)
    precond: Preconditioner
    centred: bool


def prepare(method, moment: Moment, *, centred: bool) -> Input:
    """Pre-conditioner of an input; ``centred`` for layers whose bias takes the mean (LatentLLM App. B.2)."""
    C = moment.covariance if centred else moment.C
    mean_abs = moment.mean_absolute if method.precondition == "l1" else None
    precond = preconditioner(C, method.precondition, ridge=method.ridge, alpha=method.alpha, mean_abs=mean_abs)
    return Input(C, moment.mean, precond, centred)


def local(method, dense: Dense, given: Input, rank: int) -> tuple[Latent, dict]:
    """The best rank-R factors of one layer for its own output (LatentLLM Sec. 3.2), in the method's junction."""
    W = dense.weight.double()
    fit = low_rank(W, given.precond, rank=rank, C=given.C)
    bias = dense.bias
    if given.centred and bias is not None:
        bias = bias_update(W, (fit.B, fit.A), given.mean, bias.double()).to(dense.weight.dtype)
    latent, condition = latent_of(method, fit.B, fit.A, bias, dense.weight.dtype)
    report = {"rank": rank, "of": min(W.shape), "form": "local", "relative_error": fit.relative_error}
    return latent, report | {"junction_condition": condition}


def latent_of(method, B: Tensor, A: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Latent, float]:
    """Factors in the method's junction, rounded to ``dtype``; and the condition number of the block it inverted."""
    junction = apply_junction(B, A, method.junction, limit=method.condition_limit)
    form = "plain" if method.junction in ("left", "right", "symmetric") else method.junction
    stored_A, stored_B = junction.A, junction.B
    if form == "lu":
        rank, wide, tall = A.shape[0], A.shape[1], B.shape[0]
        stored_A = stored_A[tuple(torch.triu_indices(rank, wide, device=A.device))]
        stored_B = stored_B[tuple(torch.tril_indices(tall, rank, -1, device=A.device))]
    shape = (B.shape[0], A.shape[1])
    latent = Latent(
        stored_A.to(dtype), stored_B.to(dtype), bias, form, shape, A.shape[0], junction.columns, junction.rows
    )
    return latent, junction.condition
