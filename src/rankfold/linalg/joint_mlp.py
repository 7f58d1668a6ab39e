"""Up and down projection of a ReLU MLP compressed together, by auxiliary activations.

Shape legend: d input width, F hidden width, d_out output width, l calibration tokens, r_u, r_d ranks.

Samples are columns here, as in the paper. LatentLLM (arXiv:2505.18413), Sec. 4.3 and App. H, after SparseLLM: the
non-linearity is cut out by letting pre-activations ``Z`` and activations ``A`` be free and charging for every broken
link. Only ReLU has the closed form. Gated or smooth MLPs (SiLU, GELU) are not in the paper: compress their layers one
by one with :func:`rankfold.linalg.lowrank.low_rank`.

This module imports torch and rankfold.linalg only: no modules, no hooks, no device policy.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rankfold.linalg.lowrank import Preconditioner, low_rank, preconditioner, relative_norm

__all__ = ["MLP", "JointMLP", "joint_mlp", "relu_preactivation"]


class MLP(NamedTuple):
    """``y = W_down relu(W_up x + b_up) + b_down``; a bias may be None."""

    W_up: Tensor  # (F, d)
    b_up: Tensor | None  # (F,)
    W_down: Tensor  # (d_out, F)
    b_down: Tensor | None  # (d_out,)


class JointMLP(NamedTuple):
    """Result of :func:`joint_mlp`; factors and biases in the dtype of the weights. Both layers always get a bias."""

    B_up: Tensor  # (F, r_u)
    A_up: Tensor  # (r_u, d)
    b_up: Tensor  # (F,)
    B_down: Tensor  # (d_out, r_d)
    A_down: Tensor  # (r_d, F)
    b_down: Tensor  # (d_out,)
    loss_history: list[float]  # L4 of the local solution, then after each round; non-increasing
    relative_error: float  # RMS error of the MLP output over its RMS, on X
    local_relative_error: float  # the same for the local solution the rounds start from


class _Fit(NamedTuple):
    B: Tensor
    A: Tensor
    bias: Tensor


class _Loss(NamedTuple):
    alpha: float
    beta: float
    gamma: float
    damp_up: float
    damp_down: float


@torch.no_grad()
def joint_mlp(
    mlp: MLP,
    X: Tensor,
    *,
    ranks: tuple[int, int],
    weights: tuple[float, float, float] = (1.0, 1.0, 1.0),
    rounds: int = 4,
    ridge: float = 1e-6,
    refit: bool = True,
) -> JointMLP:
    r"""Low-rank up and down projections that make up for each other's error.

    Minimises, over rank-limited ``W_u``, ``W_d``, biases and free ``Z``, ``A``, per token,

    .. math:: L_4 = \alpha\|W_u X + b_u - Z\|^2 + \beta\|A - \mathrm{relu}(Z)\|^2 + \gamma\|W_d A + b_d - Y\|^2

    (LatentLLM Eq. 20, 227) with ``Y`` the dense output. The damping ``ridge`` adds ``lambda I`` to both covariances,
    that is the terms ``lambda ||W - W_dense||^2``, counted in the loss. Each round updates ``A`` (Eq. 228), ``Z``
    (Eq. 229-230), ``W_u`` and ``W_d`` (SVD of the regression in its own root covariance); every update is the exact
    minimiser of its block, so the loss never rises. Eq. 229 takes ``Z = W_u X`` on the negative branch "by sign";
    here both branches are clamped to their half-line and the cheaper one is taken.

    ``weights`` multiply terms that are divided by the variance of the dense ``Z``, ``A`` and ``Y``: each is a
    relative squared error, so scaling ``X`` or a layer changes nothing, and equal weights say that a per cent lost is
    as bad in one place as in another.

    Args:
        mlp: dense weights.
        X: ``(d, l)`` calibration inputs; fp32 or fp64. ``l`` should be several times ``F``, else ``W_d``
            interpolates.
        ranks: ``(r_u, r_d)``, at most ``min(F, d)`` and ``min(d_out, F)``.
        weights: ``(alpha, beta, gamma)``, positive.
        rounds: ``>= 0``; the paper uses 4.
        ridge: relative to the mean variance of ``X``, and of the dense ``A``; ``>= 0``.
        refit: finally fit ``W_d`` once more, to the activations the compressed ``W_u`` really makes instead of the
            auxiliary ones (not in the paper; never increases the damped output error).

    Returns:
        :class:`JointMLP`.

    Raises:
        ValueError: shapes disagree, ranks, weights or rounds out of range, non-finite or constant samples.

    Cost per round: O(l F (d + d_out + F) + F^3) time; about eight (F, l) matrices of memory.
    """
    _check(mlp, X, ranks, weights, rounds, ridge)
    W_up, W_down = mlp.W_up.to(X), mlp.W_down.to(X)
    b_up = X.new_zeros(W_up.shape[0]) if mlp.b_up is None else mlp.b_up.to(X)
    b_down = X.new_zeros(W_down.shape[0]) if mlp.b_down is None else mlp.b_down.to(X)
    Z = W_up @ X + b_up[:, None]
    A = Z.relu()
    Y = W_down @ A + b_down[:, None]
    damp_up, damp_down = ridge * _variance(X, "X") / X.shape[0], ridge * _variance(A, "A") / A.shape[0]
    scale = [weight / _variance(M, name) for weight, M, name in zip(weights, (Z, A, Y), "ZAY", strict=True)]
    loss = _Loss(*scale, damp_up, damp_down)
    inputs = _statistics(X, damp_up)  # constant: decomposed once
    up = _fit(inputs, Z, W_up, damp_up, ranks[0])
    down = _fit(_statistics(A, damp_down), Y, W_down, damp_down, ranks[1])
    local, history = (up, down), [_value(loss, mlp, X, Y, Z, A, up, down)]
    for _ in range(rounds):
        A = _activation(loss, Z, Y, down)
        Z = relu_preactivation(_run(up, X), A, alpha=loss.alpha, beta=loss.beta)
        up = _fit(inputs, Z, W_up, damp_up, ranks[0])
        down = _fit(_statistics(A, damp_down), Y, W_down, damp_down, ranks[1])
        history.append(_value(loss, mlp, X, Y, Z, A, up, down))
    if refit:
        down = _fit(_statistics(_run(up, X).relu(), damp_down), Y, W_down, damp_down, ranks[1])
    errors = [relative_norm(_run(d, _run(u, X).relu()) - Y, Y) for u, d in ((up, down), local)]
    factors = (M.to(mlp.W_up.dtype) for M in (up.B, up.A, up.bias, down.B, down.A, down.bias))
    return JointMLP(*factors, history, *errors)


def relu_preactivation(U: Tensor, A: Tensor, *, alpha: float, beta: float) -> Tensor:
    r"""Elementwise minimiser of :math:`\alpha (u - z)^2 + \beta (a - \max(z, 0))^2` over ``z``.

    LatentLLM Eq. 22 and 229-230: ``z_- = min(u, 0)``, ``z_+ = max((alpha u + beta a) / (alpha + beta), 0)``,
    whichever costs less.
    """
    low, high = U.clamp_max(0), ((alpha * U + beta * A) / (alpha + beta)).clamp_min(0)
    cost_low = alpha * (U - low).square() + beta * A.square()
    cost_high = alpha * (U - high).square() + beta * (A - high).square()
    return torch.where(cost_low <= cost_high, low, high)


def _activation(loss: _Loss, Z: Tensor, Y: Tensor, down: _Fit) -> Tensor:
    """Eq. 228, in its dual form: one solve of size d_out instead of F."""
    W, A = down.B @ down.A, Z.relu()
    inner = loss.gamma * (W @ W.T) + loss.beta * torch.eye(W.shape[0], dtype=W.dtype, device=W.device)
    return A + loss.gamma * W.T @ torch.linalg.solve(inner, Y - down.bias[:, None] - W @ A)


def _statistics(X: Tensor, damp: float) -> tuple[Tensor, Tensor, Preconditioner]:
    """Centred samples, their mean, and the root of the damped covariance."""
    mean = X.mean(1)
    centred = X - mean[:, None]
    C = centred @ centred.T / X.shape[1]
    return (
        centred,
        mean,
        preconditioner(C + damp * torch.eye(C.shape[0], dtype=C.dtype, device=C.device), "rootcov", ridge=0),
    )


def _fit(statistics: tuple[Tensor, Tensor, Preconditioner], target: Tensor, W: Tensor, damp: float, rank: int) -> _Fit:
    """Exact minimiser of ``||B A x + b - target||^2 / l + damp ||B A - W||^2`` at the given rank."""
    centred, mean, root = statistics
    cross = (target - target.mean(1, keepdim=True)) @ centred.T / centred.shape[1] + damp * W
    regression = root.undo(root.undo(cross)) / root.scale**2
    B, A, _, _ = low_rank(regression, root, rank=rank)
    return _Fit(B, A, target.mean(1) - B @ (A @ mean))


def _run(fit: _Fit, X: Tensor) -> Tensor:
    return fit.B @ (fit.A @ X) + fit.bias[:, None]


def _value(loss: _Loss, mlp: MLP, X: Tensor, Y: Tensor, Z: Tensor, A: Tensor, up: _Fit, down: _Fit) -> float:
    tokens = X.shape[1]
    first = (_run(up, X) - Z).square().sum() / tokens + loss.damp_up * (up.B @ up.A - mlp.W_up.to(X)).square().sum()
    second = (A - Z.relu()).square().sum() / tokens
    third = (_run(down, A) - Y).square().sum() / tokens
    third = third + loss.damp_down * (down.B @ down.A - mlp.W_down.to(X)).square().sum()
    return (loss.alpha * first + loss.beta * second + loss.gamma * third).item()


def _variance(M: Tensor, name: str) -> float:
    """Summed over rows, per token."""
    value = (M - M.mean(1, keepdim=True)).square().sum().item() / M.shape[1]
    rounding = (10 * torch.finfo(M.dtype).eps) ** 2 * M.square().sum().item() / M.shape[1]
    if not value > rounding:
        raise ValueError(
            f"{name} does not vary over the samples, so its error has no scale; use more calibration tokens"
        )
    return value


def _check(mlp: MLP, X: Tensor, ranks, weights, rounds: int, ridge: float) -> None:
    (F, d), (d_out, hidden) = mlp.W_up.shape, mlp.W_down.shape
    if hidden != F or X.ndim != 2 or X.shape[0] != d:
        raise ValueError(
            f"W_up (F, d), W_down (d_out, F), X (d, l) expected, got ({F}, {d}), ({d_out}, {hidden}), {tuple(X.shape)}"
        )
    if not torch.isfinite(X).all():
        raise ValueError("X has non-finite entries; were the activations stored in fp16?")
    for name, rank, full in (("up", ranks[0], min(F, d)), ("down", ranks[1], min(d_out, F))):
        if not 1 <= rank <= full:
            raise ValueError(f"{name} rank must be in [1, {full}], got {rank}")
    if rounds < 0 or ridge < 0 or not all(weight > 0 for weight in weights):
        raise ValueError(f"rounds and ridge must be >= 0 and weights > 0, got {rounds}, {ridge}, {tuple(weights)}")
