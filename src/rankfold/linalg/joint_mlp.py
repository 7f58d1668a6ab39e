"""Up and down projection of a ReLU MLP compressed together, by auxiliary activations.

Shape legend: d input width, F hidden width, d_out output width, l calibration tokens, r_u, r_d ranks.

Samples are columns here, as in the paper; they are gone through in chunks, and what a chunk has become after some rounds
is computed anew from the fits of these rounds. LatentLLM (arXiv:2505.18413), Sec. 4.3 and App. H, after SparseLLM: the
non-linearity is cut out by letting pre-activations ``Z`` and activations ``A`` be free and charging for every broken
link. Only ReLU has the closed form. Gated or smooth MLPs (SiLU, GELU) are not in the paper: compress their layers one
by one with :func:`rankfold.linalg.lowrank.low_rank`.

This module imports torch and rankfold.linalg only: no modules, no hooks, no device policy.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rankfold.linalg.affine_fit import AffineFit, Sums, damped_root, fit_affine, run_affine
from rankfold.linalg.psd import all_finite

__all__ = ["MLP", "JointMLP", "joint_mlp", "mlp_error", "relu_preactivation", "varies"]

CHUNK = 1024  # samples whose Z, A and Y are in memory at a time


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
        X: ``(d, l)`` calibration inputs, computed with in fp64 chunk by chunk. ``l`` should be several times ``F``, else
            ``W_d`` interpolates: judge by :func:`mlp_error` on inputs that were not fitted.
        ranks: ``(r_u, r_d)``, at most ``min(F, d)`` and ``min(d_out, F)``.
        weights: ``(alpha, beta, gamma)``, positive.
        rounds: ``>= 0``; the paper uses 4.
        ridge: relative to the mean variance of ``X``, and of the dense ``A``; ``>= 0``.
        refit: finally fit ``W_d`` once more, to the activations the compressed ``W_u`` really makes instead of the
            auxiliary ones (not in the paper; never increases the damped output error).

    Returns:
        :class:`JointMLP`.

    Raises:
        ValueError: shapes disagree, ranks, weights or rounds out of range, non-finite samples, or nothing :func:`varies`.

    Cost of round t: O(l F (d + d_out + F) + F^3) and t replays of O(l F (d + d_out)); memory O(F^2 + F d), whatever ``l``.
    """
    _check(mlp, X, ranks, weights, rounds, ridge)
    dense = MLP(*(None if part is None else part.to(X.device, torch.float64) for part in mlp))
    inputs, hidden = _sums(dense, X)
    loss = _loss(inputs, hidden, weights, ridge)
    root = damped_root(inputs.covariance(), loss.damp_up)  # the inputs stay as they are: decomposed once
    up = fit_affine(inputs, root, dense.W_up, loss.damp_up, ranks[0])
    down = fit_affine(hidden, None, dense.W_down, loss.damp_down, ranks[1])
    fits, history = [(up, down)], []
    for last in [False] * rounds + [True]:
        inputs, hidden, value = Sums(), Sums(), 0.0
        for x in _chunks(X):
            Z, A, Y = _replay(dense, loss, fits[:-1], x)
            value += _broken_links(loss, x, Z, A, Y, *fits[-1])
            if not last:
                Z, A, _ = _step(loss, fits[-1], x, Z, Y)
                inputs.add(x, Z)
            hidden.add(run_affine(fits[-1][0], x).relu() if last else A, Y)
        history.append(value / X.shape[1] + _shrinkage(loss, dense, *fits[-1]))
        if not last:
            up = fit_affine(inputs, root, dense.W_up, loss.damp_up, ranks[0])
            fits.append((up, fit_affine(hidden, None, dense.W_down, loss.damp_down, ranks[1])))
    up, down = fits[-1]
    if refit:
        down = fit_affine(hidden, None, dense.W_down, loss.damp_down, ranks[1])
    errors = [mlp_error(dense, _multiplied(*pair), X) for pair in ((up, down), fits[0])]
    factors = (M.to(mlp.W_up.dtype) for M in (up.B, up.A, up.bias, down.B, down.A, down.bias))
    return JointMLP(*factors, history, *errors)


@torch.no_grad()
def mlp_error(mlp: MLP, other: MLP, X: Tensor) -> float:
    """RMS difference of the outputs of two MLPs over the RMS output of the first, on inputs ``X`` (d, l), in fp64."""
    gap = energy = 0.0
    mlp, other = (MLP(*(None if M is None else M.to(X.device, torch.float64) for M in one)) for one in (mlp, other))
    for x in _chunks(X):
        Y = _replay(mlp, None, [], x)[2]
        gap += (_replay(other, None, [], x)[2] - Y).square().sum().item()
        energy += Y.square().sum().item()
    return (gap / max(energy, torch.finfo(torch.float64).tiny)) ** 0.5


@torch.no_grad()
def varies(mlp: MLP, X: Tensor) -> bool:
    """Whether everything :func:`joint_mlp` measures errors by varies over the samples ``X`` (d, l).

    It does not where the MLP is always off: then its layers have nothing to make up for each other.
    """
    dense = MLP(*(None if part is None else part.to(X.device, torch.float64) for part in mlp))
    inputs, hidden = _sums(dense, X)
    return all(inputs.variances() + hidden.variances())


def relu_preactivation(U: Tensor, A: Tensor, *, alpha: float, beta: float) -> Tensor:
    r"""Elementwise minimiser of :math:`\alpha (u - z)^2 + \beta (a - \max(z, 0))^2` over ``z``.

    LatentLLM Eq. 22 and 229-230: ``z_- = min(u, 0)``, ``z_+ = max((alpha u + beta a) / (alpha + beta), 0)``,
    whichever costs less.
    """
    low, high = U.clamp_max(0), ((alpha * U + beta * A) / (alpha + beta)).clamp_min(0)
    cost_low = alpha * (U - low).square() + beta * A.square()
    cost_high = alpha * (U - high).square() + beta * (A - high).square()
    return torch.where(cost_low <= cost_high, low, high)


def _sums(mlp: MLP, X: Tensor) -> tuple[Sums, Sums]:
    """Of ``X`` and ``Z``, and of ``A`` and ``Y``, before the first round."""
    inputs, hidden = Sums(), Sums()
    for x in _chunks(X):
        Z, A, Y = _replay(mlp, None, [], x)
        inputs.add(x, Z)
        hidden.add(A, Y)
    return inputs, hidden


def _chunks(X: Tensor):
    return (x.double() for x in X.split(CHUNK, 1))


def _replay(
    mlp: MLP, loss: _Loss | None, fits: list[tuple[AffineFit, AffineFit]], X: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``Z``, ``A`` of these samples after the rounds that started from ``fits``, and the dense output ``Y``."""
    Z = mlp.W_up @ X + (0 if mlp.b_up is None else mlp.b_up[:, None])
    A = Z.relu()
    Y = mlp.W_down @ A + (0 if mlp.b_down is None else mlp.b_down[:, None])
    for pair in fits:
        Z, A, Y = _step(loss, pair, X, Z, Y)
    return Z, A, Y


def _step(
    loss: _Loss, fits: tuple[AffineFit, AffineFit], X: Tensor, Z: Tensor, Y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One round of the auxiliary variables: Eq. 228, then Eq. 229-230."""
    up, down = fits
    A = _activation(loss, Z, Y, down)
    return relu_preactivation(run_affine(up, X), A, alpha=loss.alpha, beta=loss.beta), A, Y


def _activation(loss: _Loss, Z: Tensor, Y: Tensor, down: AffineFit) -> Tensor:
    """Eq. 228, in its dual form: one solve of size d_out instead of F."""
    W, A = down.B @ down.A, Z.relu()
    inner = loss.gamma * (W @ W.T)
    inner.diagonal().add_(loss.beta)
    return A + loss.gamma * W.T @ torch.linalg.solve(inner, Y - down.bias[:, None] - W @ A)


def _multiplied(up: AffineFit, down: AffineFit) -> MLP:
    return MLP(up.B @ up.A, up.bias, down.B @ down.A, down.bias)


def _broken_links(loss: _Loss, X: Tensor, Z: Tensor, A: Tensor, Y: Tensor, up: AffineFit, down: AffineFit) -> float:
    """The three terms of L4, summed over these samples."""
    first, third = (run_affine(up, X) - Z).square().sum(), (run_affine(down, A) - Y).square().sum()
    return (loss.alpha * first + loss.beta * (A - Z.relu()).square().sum() + loss.gamma * third).item()


def _shrinkage(loss: _Loss, mlp: MLP, up: AffineFit, down: AffineFit) -> float:
    """The damping in L4."""
    first, third = (up.B @ up.A - mlp.W_up).square().sum(), (down.B @ down.A - mlp.W_down).square().sum()
    return (loss.alpha * loss.damp_up * first + loss.gamma * loss.damp_down * third).item()


def _loss(inputs: Sums, hidden: Sums, weights: tuple[float, float, float], ridge: float) -> _Loss:
    """Weights over the variances of the dense ``Z``, ``A``, ``Y``, and the damping of both layers."""
    x, z, a, y = found = (*inputs.variances(), *hidden.variances())
    for name, value in zip("XZAY", found, strict=True):
        if not value:
            raise ValueError(
                f"{name} does not vary over the samples, so its error has no scale; use more calibration tokens"
            )
    scale = [weight / variance for weight, variance in zip(weights, (z, a, y), strict=True)]
    return _Loss(*scale, ridge * x / len(inputs.second), ridge * a / len(hidden.second))


def _check(mlp: MLP, X: Tensor, ranks, weights, rounds: int, ridge: float) -> None:
    (F, d), (d_out, hidden) = mlp.W_up.shape, mlp.W_down.shape
    if hidden != F or X.ndim != 2 or X.shape[0] != d:
        raise ValueError(
            f"W_up (F, d), W_down (d_out, F), X (d, l) expected, got ({F}, {d}), ({d_out}, {hidden}), {tuple(X.shape)}"
        )
    if not all_finite(X):
        raise ValueError("X has non-finite entries; were the activations stored in fp16?")
    for name, rank, full in (("up", ranks[0], min(F, d)), ("down", ranks[1], min(d_out, F))):
        if not 1 <= rank <= full:
            raise ValueError(f"{name} rank must be in [1, {full}], got {rank}")
    if rounds < 0 or ridge < 0 or not all(weight > 0 for weight in weights):
        raise ValueError(f"rounds and ridge must be >= 0 and weights > 0, got {rounds}, {ridge}, {tuple(weights)}")
