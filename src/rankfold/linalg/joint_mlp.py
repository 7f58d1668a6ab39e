"""Up and down projection of a ReLU MLP compressed together, by auxiliary activations.

Shape legend: d input width, F hidden width, d_out output width, l calibration tokens, r_u, r_d ranks.

Samples are columns here, as in the paper; they are gone through in chunks, and what a chunk has become after some
rounds is computed anew from the fits of these rounds. LatentLLM (arXiv:2505.18413), Sec. 4.3 and App. H, after
SparseLLM: the non-linearity is cut out by letting pre-activations ``Z`` and activations ``A`` be free and charging for
every broken link. Only ReLU has the closed form. Gated or smooth MLPs (SiLU, GELU) are not in the paper: compress their
layers one by one with :func:`rankfold.linalg.lowrank.low_rank`.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rankfold.linalg.affine_fit import AffineFit, Sums, damped_root, fit_affine, run_affine
from rankfold.linalg.psd import all_finite

CHUNK = 1024  # samples whose Z, A and Y are in memory at a time


class MLP(NamedTuple):
    """``y = W_down relu(W_up x + b_up) + b_down``; a bias may be None."""

    W_up: Tensor  # (F, d)
    b_up: Tensor | None  # (F,)
    W_down: Tensor  # (d_out, F)
    b_down: Tensor | None  # (d_out,)


class JointMLP(NamedTuple):
    """Result of :func:`joint_mlp`; factors and biases in the dtype of the weights. A bias that the dense layer lacks is
    zero."""

    B_up: Tensor  # (F, r_u)
    A_up: Tensor  # (r_u, d)
    b_up: Tensor  # (F,)
    B_down: Tensor  # (d_out, r_d)
    A_down: Tensor  # (r_d, F)
    b_down: Tensor  # (d_out,)
    loss_history: list[float]  # L4 of the local solution, then after each round; non-increasing
    relative_error: float  # RMS error of the MLP output over its RMS, on X
    local_relative_error: float  # the same for the local solution the rounds start from


Fits = tuple[AffineFit, AffineFit]  # of the up and of the down projection


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

    Minimises, over rank-limited ``W_u``, ``W_d``, the biases that there are and free ``Z``, ``A``, per token,

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
        X: ``(d, l)`` calibration inputs, computed with in fp64 chunk by chunk. ``l`` should be several times ``F``,
            else ``W_d`` interpolates: judge by :func:`mlp_error` on inputs that were not fitted.
        ranks: ``(r_u, r_d)``, at most ``min(F, d)`` and ``min(d_out, F)``.
        weights: ``(alpha, beta, gamma)``, positive.
        rounds: ``>= 0``; the paper uses 4 (Sec. 5).
        ridge: relative to the mean variance of ``X``, and of the dense ``A``; ``>= 0``.
        refit: finally fit ``W_d`` once more, to the activations the compressed ``W_u`` really makes instead of the
            auxiliary ones (not in the paper; never increases the damped output error).

    Raises:
        ValueError: shapes disagree, ranks, weights or rounds out of range, non-finite samples, or nothing
            :func:`varies`.

    Cost of round t: O(l F (d + d_out + F) + F^3) and t replays of O(l F (d + d_out)); memory O(F^2 + F d), whatever
    ``l``.
    """
    _check(mlp, X, ranks, weights, rounds, ridge)
    dense = _in_fp64(mlp, X)
    inputs, hidden = _sums(dense, X)
    loss = _loss(inputs, hidden, weights, ridge)
    root = damped_root(inputs.moment(), loss.damp_up)  # the inputs stay as they are: decomposed once

    def fit_up(inputs: Sums) -> AffineFit:
        return fit_affine(inputs, root, dense.W_up, loss.damp_up, ranks[0])

    def fit_down(hidden: Sums) -> AffineFit:
        return fit_affine(hidden, None, dense.W_down, loss.damp_down, ranks[1])

    history, fits = list[float](), [(fit_up(inputs), fit_down(hidden))]
    for _ in range(rounds):
        value, inputs, hidden = _pass(dense, loss, fits, X, _step)
        history.append(value)
        fits.append((fit_up(inputs), fit_down(hidden)))
    value, _, hidden = _pass(dense, loss, fits, X, _forward)
    history.append(value)
    up, down = fits[-1]
    if refit:
        down = fit_down(hidden)
    error, local = (mlp_error(dense, MLP(u.B @ u.A, u.bias, d.B @ d.A, d.bias), X) for u, d in ((up, down), fits[0]))
    dtype = mlp.W_up.dtype
    return JointMLP(*up.to(dtype), *down.to(dtype), history, error, local)


@torch.no_grad()
def mlp_error(mlp: MLP, other: MLP, X: Tensor) -> float:
    """RMS difference of the outputs of two MLPs over the RMS output of the first, on inputs ``X`` (d, l), in fp64."""
    gap = energy = 0.0
    mlp, other = _in_fp64(mlp, X), _in_fp64(other, X)
    for x in _chunks(X):
        Y = _dense(mlp, x)[2]
        gap += (_dense(other, x)[2] - Y).square().sum().item()
        energy += Y.square().sum().item()
    return (gap / max(energy, torch.finfo(torch.float64).tiny)) ** 0.5


@torch.no_grad()
def varies(mlp: MLP, X: Tensor) -> bool:
    """Whether everything :func:`joint_mlp` measures errors by varies over the samples ``X`` (d, l).

    It does not where the MLP is always off: then its layers have nothing to make up for each other.
    """
    inputs, hidden = _sums(_in_fp64(mlp, X), X)
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
    inputs, hidden = _empty(mlp)
    for x in _chunks(X):
        Z, A, Y = _dense(mlp, x)
        inputs.add(x, Z)
        hidden.add(A, Y)
    return inputs, hidden


def _empty(mlp: MLP) -> tuple[Sums, Sums]:
    """Return no sums yet of both layers; a layer without a bias is fitted without one."""
    return Sums(centred=mlp.b_up is not None), Sums(centred=mlp.b_down is not None)


def _in_fp64(mlp: MLP, X: Tensor) -> MLP:
    """Return the weights in fp64 on the device of ``X``."""
    b_up, b_down = (None if b is None else b.to(X.device, torch.float64) for b in (mlp.b_up, mlp.b_down))
    return MLP(mlp.W_up.to(X.device, torch.float64), b_up, mlp.W_down.to(X.device, torch.float64), b_down)


def _chunks(X: Tensor) -> Iterator[Tensor]:
    return (x.double() for x in X.split(CHUNK, 1))


def _dense(mlp: MLP, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``Z``, ``A`` and ``Y`` of the dense layers."""
    Z = mlp.W_up @ X + (0 if mlp.b_up is None else mlp.b_up[:, None])
    A = Z.relu()
    return Z, A, mlp.W_down @ A + (0 if mlp.b_down is None else mlp.b_down[:, None])


def _pass(
    mlp: MLP,
    loss: _Loss,
    fits: list[Fits],
    X: Tensor,
    last: Callable[[_Loss, Fits, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[float, Sums, Sums]:
    """Go through all samples once, replaying the rounds that started from each of ``fits`` but the last.

    Args:
        last: what ``Z`` and ``A`` become with the last of ``fits``.

    Returns:
        L4 of the last of ``fits``, before ``last``; sums of ``X`` and ``Z``, and of ``A`` and ``Y``, after it.
    """
    (inputs, hidden), value = _empty(mlp), 0.0
    for x in _chunks(X):
        Z, A, Y = _dense(mlp, x)
        for pair in fits[:-1]:
            Z, A = _step(loss, pair, x, Z, Y)
        value += _broken_links(loss, x, Z, A, Y, *fits[-1])
        Z, A = last(loss, fits[-1], x, Z, Y)
        inputs.add(x, Z)
        hidden.add(A, Y)
    return value / X.shape[1] + _shrinkage(loss, mlp, *fits[-1]), inputs, hidden


def _step(loss: _Loss, fits: Fits, X: Tensor, Z: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """One round of the auxiliary variables: Eq. 228, then Eq. 229-230."""
    up, down = fits
    A = _activation(loss, Z, Y, down)
    return relu_preactivation(run_affine(up, X), A, alpha=loss.alpha, beta=loss.beta), A


def _forward(loss: _Loss, fits: Fits, X: Tensor, Z: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the compressed up projection makes of ``X`` instead."""
    Z = run_affine(fits[0], X)
    return Z, Z.relu()


def _activation(loss: _Loss, Z: Tensor, Y: Tensor, down: AffineFit) -> Tensor:
    """Eq. 228, in its dual form: one solve of size d_out instead of F."""
    W, A = down.B @ down.A, Z.relu()
    inner = loss.gamma * (W @ W.T)
    inner.diagonal().add_(loss.beta)
    return A + loss.gamma * W.T @ torch.linalg.solve(inner, Y - down.bias[:, None] - W @ A)


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
    (x, z), (a, y) = inputs.variances(), hidden.variances()
    for name, value in zip("XZAY", (x, z, a, y), strict=True):
        if not value:
            raise ValueError(
                f"{name} does not vary over the samples, so its error has no scale; use more calibration tokens"
            )
    alpha, beta, gamma = weights
    damp_up, damp_down = ridge * x / inputs.width, ridge * a / hidden.width
    return _Loss(alpha / z, beta / a, gamma / y, damp_up, damp_down)


def _check(
    mlp: MLP, X: Tensor, ranks: tuple[int, int], weights: tuple[float, float, float], rounds: int, ridge: float
) -> None:
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
