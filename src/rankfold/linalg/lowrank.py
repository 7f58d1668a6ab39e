"""Low-rank factors of one linear layer, optimal for the activations it sees.

Shape legend: O output width, N input width, R kept rank.

A layer ``y = W x`` becomes ``y = B (A x)`` with ``B`` (O, R) and ``A`` (R, N). Which error is small depends on the
pre-conditioner ``P``: the factors minimise ``||(W - B A) P||``. LatentLLM (arXiv:2505.18413) compares six of them in
Table 1 and shows that the root of the second moment is the optimal one.

This module imports torch and psd.py only: no modules, no hooks, no device policy.
"""

import difflib
from typing import NamedTuple

import torch
from torch import Tensor

from rankfold.linalg.psd import check_moment, psd_root

__all__ = [
    "PRECONDITIONERS",
    "LowRank",
    "Preconditioner",
    "bias_update",
    "centred_moment",
    "error_curve",
    "low_rank",
    "preconditioner",
]

PRECONDITIONERS = ("identity", "hessian", "l1", "l2", "covariance", "rootcov")


class Preconditioner(NamedTuple):
    """Result of :func:`preconditioner`. ``scale * matrix`` is the matrix of Table 1, ``||matrix||_F^2 = N``."""

    matrix: Tensor  # (N, N) symmetric, or (N,) when diagonal; free of the scale of the statistics
    inverse: Tensor  # Moore-Penrose inverse of ``matrix``, same shape
    scale: float
    is_diagonal: bool

    def apply(self, W: Tensor) -> Tensor:
        """``W P`` for ``W`` (..., N), in the dtype of ``P``."""
        W = W.to(self.matrix)
        return W * self.matrix if self.is_diagonal else W @ self.matrix

    def undo(self, A: Tensor) -> Tensor:
        """``A P^+`` for ``A`` (..., N)."""
        return A * self.inverse if self.is_diagonal else A @ self.inverse


class LowRank(NamedTuple):
    """Result of :func:`low_rank`."""

    B: Tensor  # (O, R), dtype of the weight
    A: Tensor  # (R, N), dtype of the weight
    singular_values: Tensor  # (min(O, N),) of W P, descending, dtype of the statistics
    relative_error: float  # RMS output error over RMS output


@torch.no_grad()
def preconditioner(
    C: Tensor, kind: str, *, ridge: float, alpha: float = 0.5, mean_abs: Tensor | None = None
) -> Preconditioner:
    r"""Build the matrix that turns weight error into activation error.

    With :math:`\lambda = \text{ridge} \cdot \operatorname{mean}(\operatorname{diag} C)`: ``identity`` :math:`I`;
    ``hessian`` :math:`\operatorname{diag}[(C + \lambda I)^{-1}]^{-1/2}`; ``l1``
    :math:`\operatorname{diag}[E|x|]^\alpha`; ``l2`` :math:`\operatorname{diag}[C]^{1/2}`; ``covariance`` :math:`C +
    \lambda I`; ``rootcov`` :math:`(C + \lambda I)^{1/2}`. LatentLLM, Table 1 and Remark 3 (scaling has no impact), by
    which every matrix is normalised here. App. B.1 prints the l1 form without its exponent and the covariance form
    without its damping; Table 1 is followed.

    Args:
        C: ``(N, N)`` second moment ``E[x x^T]``, or the covariance when a bias is updated; fp32 or fp64, any scale.
        kind: one of :data:`PRECONDITIONERS`.
        ridge: relative damping, ``>= 0``; used by hessian, covariance and rootcov.
        alpha: exponent of the l1 form, ``> 0``.
        mean_abs: ``(N,)`` mean absolute input ``E|x|``; needed by l1 only.

    Returns:
        :class:`Preconditioner`.

    Raises:
        ValueError: unknown kind, bad shape or range, non-finite or zero statistics.
        torch.linalg.LinAlgError: hessian of a singular moment.

    Cost: O(N^3) for hessian, covariance and rootcov, else O(N).
    """
    N = C.shape[-1]
    check_moment(C, N)
    if kind not in PRECONDITIONERS:
        guess = difflib.get_close_matches(kind, PRECONDITIONERS, n=1)
        hint = f"did you mean {guess[0]!r}? " if guess else ""
        raise ValueError(f"unknown pre-conditioner {kind!r}; {hint}available: {', '.join(PRECONDITIONERS)}")
    if ridge < 0:
        raise ValueError(f"ridge must be >= 0, got {ridge}")
    if C.diagonal().mean() <= 0:
        raise ValueError("C has no energy (its diagonal is zero); was any calibration token seen?")
    if kind in ("covariance", "rootcov"):
        root = psd_root(C, ridge=ridge)
        if kind == "rootcov":
            return _normalised(root.root, root.inverse)
        return _normalised(root.root @ root.root, root.inverse @ root.inverse)
    diagonal = _diagonal(C, kind, ridge, alpha, mean_abs)
    return _normalised(diagonal, torch.where(diagonal > 0, 1 / diagonal, torch.zeros_like(diagonal)))


def _diagonal(C: Tensor, kind: str, ridge: float, alpha: float, mean_abs: Tensor | None) -> Tensor:
    """The (N,) diagonal of the four diagonal kinds."""
    N = C.shape[-1]
    if kind == "identity":
        return torch.ones(N, dtype=C.dtype, device=C.device)
    if kind == "l2":
        return C.diagonal().clamp_min(0).sqrt()
    if kind == "hessian":
        root = psd_root(C, ridge=ridge)
        if root.rank < N:
            raise torch.linalg.LinAlgError(
                f"C has rank {root.rank} of {N}, so the hessian pre-conditioner does not exist at ridge={ridge:.1e}; "
                "raise the ridge or use kind='rootcov'"
            )
        return root.inverse.square().sum(0).rsqrt()  # diag((C + lam I)^-1) = squared column norms of the inverse root
    if mean_abs is None:
        raise ValueError("kind='l1' needs mean_abs = E|x| of shape (N,); pass it or use kind='l2'")
    if mean_abs.shape != (N,) or not torch.isfinite(mean_abs).all() or not (mean_abs >= 0).all() or mean_abs.sum() == 0:
        raise ValueError(f"mean_abs must be ({N},), finite, >= 0 and not all zero, got {tuple(mean_abs.shape)}")
    if alpha <= 0:
        raise ValueError(f"alpha must be > 0, got {alpha}")
    return mean_abs.to(C).pow(alpha)


def _normalised(matrix: Tensor, inverse: Tensor) -> Preconditioner:
    scale = (matrix.norm() / matrix.shape[-1] ** 0.5).item()
    return Preconditioner(matrix / scale, inverse * scale, scale, matrix.ndim == 1)


@torch.no_grad()
def low_rank(W: Tensor, precond: Preconditioner, *, rank: int, C: Tensor | None = None) -> LowRank:
    r"""Best rank-``rank`` factors of a weight in the metric of a pre-conditioner.

    Solves :math:`\min_{B, A} \|(W - B A) P\|_F` by :math:`U S V = \mathrm{svd}_r[W P]`: LatentLLM Eq. 3 and 7 with
    ``J = I``. ``B = U S``; ``A = S^{-1} U^T W``, which equals the paper's ``V P^+`` whenever ``P`` is invertible,
    does not amplify the rounding of ``P^+``, and keeps the output right on inputs outside the span of the calibration
    data. (Eq. 42 of the paper has a stray ``S'`` in ``A``, against its Eq. 39.) Signs: the largest entry of each
    column of ``U`` is positive.

    Args:
        W: ``(O, N)`` weight, any float dtype. Pass it in the dtype of the statistics to get unrounded factors, which
            is what :func:`rankfold.linalg.junction.apply_junction` wants. Stack weights along ``O`` for shared ``A``
            (App. C).
        precond: from :func:`preconditioner`, on the inputs of ``W``.
        rank: ``1 <= rank <= min(O, N)``.
        C: ``(N, N)`` metric of ``relative_error``; default: the metric of ``precond``.

    Returns:
        :class:`LowRank`. At full rank the weight comes back.

    Raises:
        ValueError: shapes disagree, rank out of range, non-finite weight.

    Cost: one SVD of ``(O, N)``.
    """
    _check_weight(W, precond)
    out, N = W.shape
    if not 1 <= rank <= min(out, N):
        raise ValueError(f"rank must be in [1, {min(out, N)}] for a ({out}, {N}) weight, got {rank}")
    weight = W.to(precond.matrix)
    U, S = _left_singular(precond.apply(weight))
    floor = max(out, N) * torch.finfo(S.dtype).eps * S[0].clamp_min(torch.finfo(S.dtype).tiny)
    size = S[:rank].clamp_min(floor)  # a zero singular value must not turn into a division by zero
    B, A = U[:, :rank] * size, (U[:, :rank].T @ weight) / size[:, None]
    if C is None:
        error = relative_norm(precond.apply(weight - B @ A), precond.apply(weight))
    else:
        check_moment(C, N)
        error = metric_error(weight - B @ A, weight, C.to(weight))
    return LowRank(B.to(W.dtype), A.to(W.dtype), S, error)


@torch.no_grad()
def error_curve(W: Tensor, precond: Preconditioner, *, C: Tensor | None = None) -> Tensor:
    r"""Relative error of :func:`low_rank` at every rank, from one SVD.

    The gap at rank ``r`` is ``(I - U_r U_r^T) W``, so its square in the metric ``C`` is the sum of ``u_i^T W C W^T
    u_i`` over ``i > r``: exact for every pre-conditioner, not only for the optimal one (LatentLLM A.1 gives the
    identity case).

    Args:
        W: ``(O, N)`` weight.
        precond: from :func:`preconditioner`.
        C: ``(N, N)`` metric of the error; default: the metric of ``precond``.

    Returns:
        ``(min(O, N) + 1,)`` errors at ranks ``0, 1, ...``, non-increasing, the first one 1.

    Raises:
        ValueError: shapes disagree, non-finite weight or statistics.

    Cost: one SVD of ``(O, N)`` and two products of its size.
    """
    _check_weight(W, precond)
    weight = W.to(precond.matrix)
    U, S = _left_singular(precond.apply(weight))
    outside = weight - U @ (U.T @ weight)  # zero unless O > N and P is singular
    if C is None:
        energy, rest = S.square(), precond.apply(outside).square().sum()
    else:
        check_moment(C, W.shape[1])
        rows, C = U.T @ weight, C.to(weight)
        energy, rest = ((rows @ C) * rows).sum(1).clamp_min(0), ((outside @ C) * outside).sum().clamp_min(0)
    tail = torch.cat([energy, energy.new_zeros(1)]).flip(0).cumsum(0).flip(0) + rest
    return (tail / tail[0].clamp_min(torch.finfo(tail.dtype).tiny)).sqrt()


@torch.no_grad()
def bias_update(W: Tensor, factors: tuple[Tensor, Tensor], mean: Tensor, bias: Tensor | None) -> Tensor:
    r"""Bias that makes the compressed layer right on average.

    :math:`\hat b = b + (W - B A)\mu`, the least-squares bias for given factors: LatentLLM Eq. 45. The factors
    themselves are then optimal for the covariance ``C - mean mean^T`` (:func:`centred_moment`), Eq. 49.

    Args:
        W: ``(O, N)`` weight.
        factors: ``(B, A)`` as they will be stored, ``(O, R)`` and ``(R, N)``.
        mean: ``(N,)`` mean input, fp32 or fp64.
        bias: ``(O,)`` or None for none.

    Returns:
        ``(O,)`` bias, dtype of ``W``.

    Raises:
        ValueError: shapes disagree.
    """
    B, A = (factor.to(mean) for factor in factors)
    if mean.shape != W.shape[1:] or (B.shape[0], A.shape[1]) != W.shape or B.shape[1] != A.shape[0]:
        raise ValueError(
            f"W {tuple(W.shape)}, B {tuple(B.shape)}, A {tuple(A.shape)}, mean {tuple(mean.shape)} do not match"
        )
    start = torch.zeros_like(B[:, 0]) if bias is None else bias.to(mean)
    return (start + W.to(mean) @ mean - B @ (A @ mean)).to(W.dtype)


def centred_moment(C: Tensor, mean: Tensor) -> Tensor:
    """Covariance ``C - mean mean^T`` (LatentLLM Eq. 49) of inputs with second moment ``C`` (N, N) and mean (N,)."""
    check_moment(C, mean.shape[0])
    return C - torch.outer(mean, mean).to(C)


def relative_norm(gap: Tensor, reference: Tensor) -> float:
    """``||gap|| / ||reference||``, 0 when both vanish."""
    return (gap.norm() / reference.norm().clamp_min(torch.finfo(reference.dtype).tiny)).item()


def metric_error(gap: Tensor, W: Tensor, C: Tensor) -> float:
    """RMS of ``gap x`` over RMS of ``W x`` for inputs with second moment ``C``, 0 when both vanish."""
    error, energy = ((gap @ C) * gap).sum().clamp_min(0), ((W @ C) * W).sum()
    return (error / energy.clamp_min(torch.finfo(C.dtype).tiny)).sqrt().item()


def fix_signs(U: Tensor) -> Tensor:
    """Flip columns so that the largest entry of each is positive."""
    largest = U.gather(0, U.abs().argmax(0, keepdim=True))
    return U * torch.where(largest < 0, -1.0, 1.0).to(U)


def _left_singular(M: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors with fixed signs, and singular values, descending."""
    U, S, _ = torch.linalg.svd(M, full_matrices=False)
    return fix_signs(U), S


def _check_weight(W: Tensor, precond: Preconditioner) -> None:
    N = precond.matrix.shape[0]
    if W.ndim != 2 or W.shape[1] != N:
        raise ValueError(f"W must be (out, {N}) to match the pre-conditioner, got {tuple(W.shape)}")
    if not torch.isfinite(W).all():
        raise ValueError("W has non-finite entries; check the checkpoint")
