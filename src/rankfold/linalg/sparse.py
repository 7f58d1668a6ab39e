"""Sparse weights, and low-rank plus sparse ones, for the activations they see.

Shape legend: O output width, N input width, R rank.

LatentLLM (arXiv:2505.18413), App. I: ``W ~ B A + D`` with at most ``count`` non-zeros in ``D``, in the metric ``||(W
- B A - D) C^(1/2)||``. Choosing the non-zeros is NP-hard; all solvers here are gradient steps followed by a
shrinkage. They work on ``D diag(C)^(1/2)``: the same problem with unit diagonal, which makes "largest entry" mean
largest effect on the output, fits the step to outlier features, and makes the result free of the scale of ``C`` and
of its coordinates.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rankfold.linalg.lowrank import low_rank, metric_error
from rankfold.linalg.preconditioner import preconditioner
from rankfold.linalg.psd import all_finite, check_moment, damped

METHODS = ("diagonal", "hard", "soft", "ste")
STEPS = 50  # of conjugate gradients, at most


class Sparse(NamedTuple):
    """Result of :func:`sparse`."""

    D: Tensor  # (O, N) dense tensor with zeros, dtype of the weight
    loss_history: list[float]  # relative error per iteration
    relative_error: float  # RMS output error over RMS output


class LowRankSparse(NamedTuple):
    """Result of :func:`low_rank_plus_sparse`; dtype of the weight."""

    B: Tensor  # (O, R)
    A: Tensor  # (R, N)
    D: Tensor  # (O, N)
    loss_history: list[float]  # relative error after each round
    relative_error: float


def soft_shrink(x: Tensor, threshold: float | Tensor) -> Tensor:
    """``sign(x) (|x| - t)_+``. LatentLLM Eq. 236 misses the absolute value."""
    return x.sign() * (x.abs() - threshold).clamp_min(0)


def hard_shrink(x: Tensor, count: int) -> Tensor:
    """Keep the ``count`` entries of largest magnitude: ``S_kappa`` of LatentLLM Eq. 237."""
    out = torch.zeros_like(x).flatten()
    keep = x.abs().flatten().topk(count, sorted=False).indices
    out[keep] = x.flatten()[keep]
    return out.view_as(x)


@torch.no_grad()
def sparse(
    W: Tensor, C: Tensor, *, count: int, method: str = "hard", iterations: int = 50, ridge: float = 0.0
) -> Sparse:
    r"""Sparse approximation of a weight with a given number of non-zeros.

    Minimises :math:`\|(D - W)(C + \lambda I)^{1/2}\|^2` over :math:`\|D\|_0 \le` ``count`` (LatentLLM App. I).
    ``diagonal``: closed form for diagonal ``C`` (Eq. 238, the criterion of WandA), weights unchanged. The others start
    there. ``hard``: hard shrinkage after each gradient step, loss never rises; ``soft``: soft shrinkage by the
    ``count``-th magnitude; ``ste``: the gradient passes straight through (Eq. 237), zeros keep a hidden value and can
    come back. The best iterate's non-zeros are then re-solved by least squares on their support.

    Args:
        W: ``(O, N)``.
        C: ``(N, N)`` second moment of the inputs; fp32 or fp64, any scale.
        count: non-zeros, ``0 <= count <= O N``.
        method: ``diagonal``, ``hard``, ``soft`` or ``ste``.
        iterations: gradient steps, ``>= 1``.
        ridge: relative to ``mean(diag C)``, ``>= 0``.

    Returns:
        :class:`Sparse`; ``loss_history`` before the re-solve and with the damping, ``relative_error`` without. Where
        ``C`` is
        zero every ``D`` is exact: the largest entries stay, ``loss_history`` is theirs, ``relative_error`` is 0.

    Raises:
        ValueError: unknown method, shapes disagree, ``count`` or ``iterations`` out of range.

    Cost: O(N^3) once and O(O N^2) per iteration.
    """
    _check(W, C, method, iterations, count)
    target, metric = W.to(C), damped(C, ridge)
    problem = _Problem(metric, target @ metric, (target @ metric * target).sum())
    if method == "diagonal":
        D = hard_shrink(target * problem.right, count) / problem.right
        history = [problem.error(D)]
    else:
        D, history = _shrink(problem, target, count, method, iterations)
    return Sparse(D.to(W.dtype), history, metric_error(target - D, target, C))


@torch.no_grad()
def low_rank_plus_sparse(
    W: Tensor, C: Tensor, *, rank: int, count: int, method: str = "hard", rounds: int = 4, ridge: float = 1e-6
) -> LowRankSparse:
    r"""Alternate a low-rank and a sparse fit of what the other leaves.

    Minimises :math:`\|(W - B A - D)(C + \lambda I)^{1/2}\|^2`, the form of LatentLLM Eq. 231 and the loss of Eq. 232
    without its penalty. The paper iterates an SVD and FISTA, which cannot be told a number of non-zeros, so a shrinkage
    that can takes its place. Never rises with ``method="hard"``; the best round is returned. The paper finds it no
    better than sparse alone (Fig. 14).

    Args:
        W, C, count, method: as in :func:`sparse`.
        rank: ``1 <= rank <= min(O, N)``.
        rounds: ``>= 1``.
        ridge: relative to ``mean(diag C)``, ``>= 0``.

    Returns:
        :class:`LowRankSparse`; the errors are with the damping. Where ``C`` is zero as in :func:`sparse`.

    Raises:
        ValueError: as :func:`sparse` and :func:`rankfold.linalg.lowrank.low_rank`.
    """
    _check(W, C, method, rounds, count)
    silent = _silent(C)
    C = damped(C, ridge)
    target, root, history = W.to(C), preconditioner(C, "rootcov", ridge=0), []
    D, best = torch.zeros_like(target), tuple[Tensor, ...]()
    for _ in range(rounds):
        B, A, _, _ = low_rank(target - D, root, rank=rank)
        rest = target - B @ A
        problem = _Problem(C, rest @ C, (rest @ C * rest).sum())
        if method == "diagonal":
            D = hard_shrink(rest * problem.right, count) / problem.right
        else:  # from the last D, so that the loss cannot rise; from the diagonal solution, so that zeros can come back
            found = [_shrink(problem, start, count, method, 20)[0] for start in (D, rest)]
            D = min(found, key=problem.error)
        history.append(metric_error(rest - D, target, C))
        if history[-1] == min(history):
            best = B, A, D
    B, A, D = (factor.to(W.dtype) for factor in best)
    return LowRankSparse(B, A, D, history, 0.0 if silent else min(history))


def _silent(C: Tensor) -> bool:
    return bool(C.diagonal().mean() <= 0)


class _Problem:
    """``energy + tr(X G X^T) - 2 tr(X^T K)`` in coordinates where ``G`` has unit diagonal."""

    def __init__(self, G: Tensor, K: Tensor, energy: Tensor):
        size = G.diagonal().clamp_min(0).sqrt()
        self.right = torch.where(
            size > 0, size, torch.ones_like(size)
        )  # a dead input has a zero row; any scale will do
        self.G = G / torch.outer(self.right, self.right)  # X_scaled = X * right
        self.K, self.energy = K / self.right, energy.clamp_min(torch.finfo(K.dtype).tiny)
        self.step = 1 / torch.linalg.eigvalsh(self.G)[-1]

    def error(self, D: Tensor) -> float:
        X = D * self.right
        return ((self.energy + ((X @ self.G - 2 * self.K) * X).sum()) / self.energy).clamp_min(0).sqrt().item()


def _shrink(problem: _Problem, start: Tensor, count: int, method: str, iterations: int) -> tuple[Tensor, list[float]]:
    """Gradient step, shrink, repeat; then least squares on the support of the best iterate."""
    latent, best, history = start * problem.right, start, list[float]()
    for _ in range(iterations):
        X = hard_shrink(latent, count)
        error = problem.error(X / problem.right)
        if not history or error < min(history):
            best = X
        history.append(error)
        base = latent if method == "ste" else X
        if method == "soft":
            base = X = soft_shrink(latent, _runner_up(latent, count))
        latent = base - (X @ problem.G - problem.K) * problem.step
    return _resolve(problem, best) / problem.right, history


def _runner_up(x: Tensor, count: int) -> Tensor:
    """The largest magnitude that is not kept, so that soft shrinkage leaves ``count`` entries."""
    return x.abs().flatten().topk(min(count + 1, x.numel())).values[-1] if count < x.numel() else x.new_zeros(())


def _resolve(problem: _Problem, X: Tensor) -> Tensor:
    """Conjugate gradients for the values on the support of ``X``."""
    mask = X != 0
    residual = (problem.K - X @ problem.G) * mask
    direction, size = residual, residual.square().sum()
    stop = size * torch.finfo(X.dtype).eps ** 2
    for _ in range(STEPS):
        moved = direction @ problem.G * mask
        curvature = (direction * moved).sum()
        if size <= stop or curvature <= 0:  # a moment may be indefinite by rounding: there is no lowest point that way
            break
        length = size / curvature
        X, residual = X + length * direction, residual - length * moved
        size, before = residual.square().sum(), size
        direction = residual + size / before * direction
    return X


def _check(W: Tensor, C: Tensor, method: str, iterations: int, count: int) -> None:
    if W.ndim != 2 or not all_finite(W):
        raise ValueError(f"W must be a finite (out, in) matrix, got {tuple(W.shape)}")
    check_moment(C, W.shape[1])
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; available: {', '.join(METHODS)}")
    if iterations < 1:
        raise ValueError(f"iterations and rounds must be >= 1, got {iterations}")
    if not 0 <= count <= W.numel():
        raise ValueError(f"count of D must be in [0, {W.numel()}], got {count}")
