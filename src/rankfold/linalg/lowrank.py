"""Low-rank factors of one linear layer, optimal for the activations it sees.

Shape legend: O output width, N input width, R kept rank.

A layer ``y = W x`` becomes ``y = B (A x)`` with ``B`` (O, R) and ``A`` (R, N). Which error is small depends on the
pre-conditioner ``P`` (preconditioner.py): the factors minimise ``||(W - B A) P||``.
"""

from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from rankfold.linalg.preconditioner import Preconditioner, RootCovariance
from rankfold.linalg.psd import ROWS, all_finite, check_moment, quadratic


class LowRank(NamedTuple):
    """Result of :func:`low_rank`."""

    B: Tensor  # (O, R), dtype of the weight
    A: Tensor  # (R, N), dtype of the weight
    singular_values: Tensor  # (min(O, N),) of W P / scale, descending, dtype of the statistics
    relative_error: float  # RMS output error over RMS output


@torch.no_grad()
def low_rank(W: Tensor, precond: Preconditioner, *, rank: int, C: Tensor | None = None) -> LowRank:
    r"""Best rank-``rank`` factors of a weight in the metric of a pre-conditioner.

    Solves :math:`\min_{B, A} \|(W - B A) P\|_F` by :math:`U S V = \mathrm{svd}_r[W P]`: LatentLLM Eq. 3 and 7 with
    ``J = I``. No SVD is made: ``S^2`` and the vectors of the shorter side come from one ``eigh`` of a Gram matrix.
    Squaring costs what lies below 1e-8 of the largest singular value (in fp64), which is below 1e-8 in the error.

    ``O <= N``, or ``P`` singular: :math:`U S^2 U^T = W P P^T W^T`, ``B = U S``, ``A = S^{-1} U^T W``. This equals the
    paper's ``V P^+`` whenever ``P`` is invertible and keeps the output right on inputs outside the span of the
    calibration data. (Eq. 42 of the paper has a stray ``S'`` in ``A``, against its Eq. 39.) ``O > N``: with
    ``E E^T = P P^T``, :math:`V S^2 V^T = E^T W^T W E`, ``B = W E V``, ``A = V^T E^{-1}``. Signs: the largest entry of
    each column of ``B`` is positive.

    Args:
        W: ``(O, N)`` weight, any float dtype. Pass it in the dtype of the statistics to get unrounded factors, which
            is what :func:`rankfold.linalg.junction.apply_junction` wants. Stack weights along ``O`` for shared ``A``
            (App. C).
        precond: from :func:`rankfold.linalg.preconditioner.preconditioner`, on the inputs of ``W``.
        rank: ``1 <= rank <= min(O, N)``.
        C: ``(N, N)`` metric of ``relative_error``; default: the metric of ``precond``. Its product with ``W`` is shared
            where it is the moment that a root covariance was made of.

    Returns:
        :class:`LowRank`. At full rank the weight comes back.

    Raises:
        ValueError: shapes disagree, rank out of range, non-finite weight.

    Cost: products of O(O N (N + R)) and an ``eigh`` of size ``min(O, N)``; where ``P`` is singular, an ``eigh`` of size
    O and products of O(O N (O + N)).
    """
    if W.ndim != 2 or W.shape[1] != precond.width:
        raise ValueError(f"W must be (out, {precond.width}) to match the pre-conditioner, got {tuple(W.shape)}")
    if not all_finite(W):
        raise ValueError("W has non-finite entries; check the checkpoint")
    out, N = W.shape
    if not 1 <= rank <= min(out, N):
        raise ValueError(f"rank must be in [1, {min(out, N)}] for a ({out}, {N}) weight, got {rank}")
    if C is not None:
        check_moment(C, N)
        C = C.to(precond.dtype)
    side = _from_outputs if out <= N or precond.singular else _from_inputs
    B, A, S, energies = side(W.to(precond.dtype), precond, rank, C)
    signs = _signs(B)
    return LowRank((B * signs).to(W.dtype), (A * signs[:, None]).to(W.dtype), S[: min(out, N)], _tail(energies, rank))


@torch.no_grad()
def shared_basis(gram: Tensor, precond: Preconditioner, *, rank: int) -> tuple[Tensor, Tensor]:
    r"""Rows that several layers of as many inputs share as a basis: Basis Sharing (arXiv:2410.03765), Sec. 3.1.

    The ``A`` of the best rank-``rank`` factors of all these weights, one above the other, in the metric ``E`` of a
    pre-conditioner: :math:`V S^2 V^T = E^T (\sum_i W_i^T W_i) E`, ``A = V^T E^{-1}``, scaled to unit rows. The
    coefficients of each layer are ``B_i = W_i E V``.

    Args:
        gram: ``(N, N)`` sum of ``W^T W`` over the layers.
        precond: of the inputs of all of them together.
        rank: ``1 <= rank <= N``.

    Returns:
        ``A`` (R, N), and ``V`` (N, R) of the same scale, dtype of the statistics. Signs: the largest entry of each
        column of ``V`` is positive.

    Raises:
        ValueError: shapes disagree, or rank out of range.
    """
    N = precond.width
    check_moment(gram, N)
    if not 1 <= rank <= N:
        raise ValueError(f"rank must be in [1, {N}] for {N} inputs, got {rank}")
    half = precond.apply(gram.to(precond.dtype))
    V = fix_signs(_descending(precond.apply(half.T))[1][:, :rank])
    A = precond.undo(V.T)
    size = A.norm(dim=1).clamp_min(torch.finfo(A.dtype).tiny)
    return A / size[:, None], V * size


def _from_outputs(W: Tensor, precond: Preconditioner, rank: int, C: Tensor | None):
    """Factors, singular values, and what every left singular vector adds to the energy of the output in ``C``."""
    if C is not None and isinstance(precond, RootCovariance) and C is precond.C:
        measured = quadratic(W, C)
        S, U = _descending(precond.damped(measured, W))
    else:
        S, U = _descending(precond.gram(W))
        measured = None if C is None else quadratic(W, C)
    energies = S.square() if measured is None else ((measured @ U) * U).sum(0)
    finfo = torch.finfo(S.dtype)  # a zero singular value must not turn into a division by zero
    size = S[:rank].clamp_min(max(W.shape) * finfo.eps * S[0].clamp_min(finfo.tiny).item())
    return U[:, :rank] * size, (U[:, :rank].T @ W) / size[:, None], S, energies


def _from_inputs(W: Tensor, precond: Preconditioner, rank: int, C: Tensor | None):
    """The same from the right singular vectors: what is lost of ``W`` is ``W E V_i V_i^T E^-1``, vector by vector."""
    coordinates = precond.apply(W)  # (O, N)
    S, V = _descending(coordinates.T @ coordinates)
    A = precond.undo(V.T)
    energies = S.square() if C is None else S.square() * ((A @ C) * A).sum(1)
    return coordinates @ V[:, :rank], A[:rank], S, energies


def _descending(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Roots of the eigenvalues of a Gram matrix, and its eigenvectors, largest first."""
    values, vectors = torch.linalg.eigh(gram)
    return values.flip(0).clamp_min(0).sqrt(), vectors.flip(1)


def _tail(energies: Tensor, rank: int) -> float:
    """Root of the part of the energy after ``rank``; every term is positive up to rounding, so nothing cancels."""
    energies = energies.clamp_min(0)
    return (energies[rank:].sum() / energies.sum().clamp_min(torch.finfo(energies.dtype).tiny)).sqrt().item()


@torch.no_grad()
def bias_update(W: Tensor, factors: tuple[Tensor, Tensor], mean: Tensor, bias: Tensor | None) -> Tensor:
    r"""Bias that makes the compressed layer right on average.

    :math:`\hat b = b + (W - B A)\mu`, the least-squares bias for given factors: LatentLLM Eq. 45. The factors
    themselves are then optimal for the covariance ``C - mean mean^T``, Eq. 49.

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


def metric_error(
    gap: Tensor, W: Tensor, C: Tensor, *, shift: Tensor | None = None, mean: Tensor | None = None
) -> float:
    """RMS of ``gap x + shift`` over RMS of ``W x`` for inputs with second moment ``C``, 0 when both vanish.

    Args:
        gap, W: ``(O, N)``.
        C: ``(N, N)``; the covariance where there is a ``shift``.
        shift: ``(O,)`` error of the mean output.
        mean: ``(O,)`` mean output, which gives the scale where nothing varies; see :func:`spread`.
    """
    error, energy = _energy(gap, C), _energy(W, C)
    error = error if shift is None else error + shift.square().sum()
    return (error / spread(energy, mean)).sqrt().item()


def spread(energy: Tensor, mean: Tensor | None) -> Tensor:
    """What an error of outputs is relative to: how much they vary, or, where that is rounding of fp32 sums, their mean.

    Args:
        energy: mean square of the outputs about their mean.
        mean: of the outputs.
    """
    least = torch.finfo(energy.dtype).tiny
    if mean is not None:
        least = max(least, torch.finfo(torch.float32).eps * mean.square().sum().item())
    return energy.clamp_min(least)


def _energy(W: Tensor, C: Tensor) -> Tensor:
    """``trace(W C W^T)``, a few rows at a time."""
    return reduce(add, (((rows @ C) * rows).sum() for rows in W.split(ROWS))).clamp_min(0)


def fix_signs(U: Tensor) -> Tensor:
    """Flip columns so that the largest entry of each is positive."""
    return U * _signs(U)


def _signs(U: Tensor) -> Tensor:
    largest = U.gather(0, U.abs().argmax(0, keepdim=True))[0]
    return torch.where(largest < 0, -1.0, 1.0).to(U)
