"""The best factors of one linear layer, before they are stored.

Shape legend: O outputs, N inputs, R latent width.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...architectures import Dense
from ...calibration.moments import BlockMoments
from ...linalg.lowrank import bias_update, low_rank, metric_error
from ...linalg.preconditioner import Preconditioner, input_weights, preconditioner
from ...linalg.sparse import low_rank_plus_sparse, sparse
from .layout import INPUTS, QKV, Slot
from .measures import Measure, OutputError
from .report import Report


class Input(NamedTuple):
    """What several layers with the same input share: its metric and its pre-conditioner."""

    statistic: str
    C: Tensor  # (N, N) moment the error is measured in, of any scale
    mean: Tensor  # (N,)
    precond: Preconditioner
    centred: bool


class RoundingTarget(NamedTuple):
    """What the rounded factors of a projection are to compute, and the metrics their error is measured in."""

    weight: Tensor  # (O, N), without the sparse part
    inputs: Tensor  # (N, N) moment of the inputs, of any scale; about their mean where the bias takes that
    heads: Tensor | None = None  # (H, h, h) metric of the outputs of each head; None: the identity


class Fit(NamedTuple):
    """Unrounded factors of a projection, ``B A + D``, and what was measured; ``R = 0`` where it is sparse alone."""

    B: Tensor  # (O, R); split heads: (H, h, R)
    A: Tensor  # (R, N); split heads: (H, R, N)
    bias: Tensor | None  # (O,)
    report: Report
    measure: Measure
    D: Tensor | None = None  # (O, N) sparse part
    mean: Tensor | None = None  # (N,) of its input, where its bias takes the mean of what rounding changes
    target: RoundingTarget | None = None  # of the refinement under rounding; there where factors are quantised


def prepare(method, moments: BlockMoments, statistic: str, *, centred: bool, weights: Tensor | None = None) -> Input:
    """Pre-conditioner of an input.

    Errors are measured in the moment of all tokens; Bolaco fits the covariance within windows.

    Args:
        centred: for layers whose bias takes the mean (LatentLLM App. B.2).
        weights: ``(N,)`` importance of the columns of one layer, which then is the only one it is for.
    """
    moment = moments[statistic]
    C = moment.covariance() if centred else moment.second.double()  # the sum as it is: no result depends on the scale
    if weights is not None:
        return Input(statistic, C, moment.mean, input_weights(weights), centred)
    mean_abs = moment.mean_absolute if method.precondition == "l1" else None
    fitted = moment.within_windows() if method.features else C
    precond = preconditioner(fitted, method.precondition, ridge=method.ridge, alpha=method.alpha, mean_abs=mean_abs)
    return Input(statistic, C, moment.mean, precond, centred)


def inputs_of(method, moments: BlockMoments, weights: Mapping[str, Tensor]) -> Callable[[str, bool], Input]:
    """Return a function that prepares the input of a module, centred or not; each once.

    Args:
        weights: module -> importance of its columns, see :func:`prepare`.
    """

    @functools.cache
    def prepared(statistic: str, centred: bool, alone: str | None) -> Input:
        return prepare(method, moments, statistic, centred=centred, weights=weights.get(alone or ""))

    return lambda module, centred: prepared(INPUTS[module], centred, module if weights else None)


def local(slot: Slot, dense: Dense, given: Input, rank: int) -> Fit:
    """The best rank-R factors of one layer for its own output (LatentLLM Sec. 3.2, App. C for a stack, App. I)."""
    W, count, method = dense.weight.double(), slot.nonzeros(rank), slot.method
    B, A, D, facts = _factors(slot, W, given, rank, count)
    form = ("local, one latent" if slot.name == QKV else "local") + facts.pop("form", "")
    report = Report(rank=rank, of=slot.full, form=form, clamped=given.precond.clamped or None, **facts)
    measure = OutputError(slot.name, given.statistic, dense, given.centred)
    fit = Fit(B, A, dense.bias, report, measure, D)
    if given.centred:
        fit = fit._replace(bias=moved_bias(W, fit, dense.bias, given.mean))
    if not method.bits:
        return fit
    target = RoundingTarget(W if D is None else W - D, given.C)
    return fit._replace(mean=given.mean if given.centred else None, target=target)


def _factors(
    slot: Slot, W: Tensor, given: Input, rank: int, count: int
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """``B``, ``A``, ``D`` and the facts that the form adds to the report."""
    method = slot.method
    if slot.split:  # a low rank of its own for every head (App. D)
        fits = [low_rank(head, given.precond, rank=rank) for head in W.unflatten(0, (slot.heads, -1))]
        B, A = torch.stack([fit.B for fit in fits]), torch.stack([fit.A for fit in fits])
        error = metric_error(W - (B @ A).flatten(0, 1), W, given.C)
        return B, A, None, {"form": ", split heads", "relative_error": error}
    if slot.alone:
        fit = sparse(W, given.C, count=count, method=method.shrink, ridge=method.ridge)
        facts = {"form": ", sparse", "nonzeros": count, "loss_history": tuple(fit.loss_history)}
        return W[:, :0], W[:0], fit.D, facts | {"relative_error": fit.relative_error}
    if count:
        fit = low_rank_plus_sparse(W, given.C, rank=rank, count=count, method=method.shrink, ridge=method.ridge)
        error = metric_error(W - fit.B @ fit.A - fit.D, W, given.C)  # the fit is to the damped moment
        facts = {"form": " + sparse", "nonzeros": count, "loss_history": tuple(fit.loss_history)}
        return fit.B, fit.A, fit.D, facts | {"relative_error": error}
    fit = low_rank(W, given.precond, rank=rank, C=given.C)
    return fit.B, fit.A, None, {"relative_error": fit.relative_error}


def product(fit: Fit) -> Dense:
    """What the fit amounts to, before it is stored."""
    weight = fit.B @ fit.A
    weight = weight.flatten(0, 1) if weight.dim() == 3 else weight
    weight = weight if fit.D is None else weight + fit.D
    return Dense(weight, None if fit.bias is None else fit.bias.double())


def moved_bias(W: Tensor, fit: Fit, bias: Tensor | None, mean: Tensor) -> Tensor:
    """Return the bias that makes a layer ``W`` right on average, in its own dtype or fp64 (App. B.2)."""
    bias = W.new_zeros(len(W)) if bias is None else bias
    B, A = (torch.block_diag(*fit.B), fit.A.flatten(0, 1)) if fit.B.dim() == 3 else (fit.B, fit.A)
    W = W if fit.D is None else W - fit.D
    return bias_update(W, (B, A), mean, bias.double()).to(bias.dtype)
