"""The matrices that turn weight error into activation error (LatentLLM, arXiv:2505.18413, Table 1).

Shape legend: O output width, N input width, R any number of rows.

A pre-conditioner ``P`` enters every problem through ``P P^T`` alone, so any ``E`` with ``E E^T = P P^T`` may stand in
for it. The root covariance is the optimal one, and its cheapest ``E`` is a Cholesky factor, three times cheaper than
one ``eigh`` and ten times cheaper than both roots. It is made only when somebody asks for coordinates
(:meth:`Preconditioner.apply`); :meth:`Preconditioner.gram` needs no factor at all.
"""

from functools import cached_property

import torch
from torch import Tensor

from rankfold.linalg.psd import check_moment, damping, psd_root, quadratic

PRECONDITIONERS = ("identity", "hessian", "l1", "l2", "covariance", "rootcov")


class Preconditioner:
    """Result of :func:`preconditioner`: ``E`` with ``E E^T = P P^T / scale^2``, ``trace(E E^T) = N``."""

    scale: float
    width: int  # N
    dtype: torch.dtype
    singular = False  # whether directions are lost by ``apply``
    clamped = False  # whether a moment that rounding made indefinite was clamped

    def apply(self, W: Tensor) -> Tensor:
        """``W E`` for ``W`` (..., N), in the dtype of the statistics."""
        raise NotImplementedError

    def undo(self, A: Tensor) -> Tensor:
        """``A E^+`` for ``A`` (..., N)."""
        raise NotImplementedError

    def solve(self, K: Tensor) -> Tensor:
        """``K (E E^T)^+`` for ``K`` (..., N)."""
        raise NotImplementedError

    def gram(self, W: Tensor) -> Tensor:
        """``W E E^T W^T`` (O, O) for ``W`` (O, N)."""
        coordinates = self.apply(W)
        return coordinates @ coordinates.T


class _Diagonal(Preconditioner):
    """``E = diag(size)``."""

    def __init__(self, size: Tensor):
        self.width, self.dtype = len(size), size.dtype
        self.scale = (size.norm() / self.width**0.5).item()
        self.size = size / self.scale
        self.inverse = torch.where(self.size > 0, 1 / self.size, torch.zeros_like(size))
        self.singular = not bool((self.size > 0).all())

    def apply(self, W: Tensor) -> Tensor:
        return W.to(self.size) * self.size

    def undo(self, A: Tensor) -> Tensor:
        return A * self.inverse

    def solve(self, K: Tensor) -> Tensor:
        return K * self.inverse.square()


class _Spectral(Preconditioner):
    """``E = U diag(size)`` with orthonormal ``U``; its inverse is none where ``size`` is below the cut-off."""

    def __init__(self, U: Tensor, size: Tensor, scale: float, least: float):
        self.width, self.dtype, self.scale, self.U = len(size), size.dtype, scale, U
        self.size, alive = size / scale, size > least
        self.inverse = torch.where(alive, 1 / self.size.clamp_min(torch.finfo(size.dtype).tiny), torch.zeros_like(size))
        self.singular = not bool(alive.all())

    def apply(self, W: Tensor) -> Tensor:
        return (W.to(self.U) @ self.U) * self.size

    def undo(self, A: Tensor) -> Tensor:
        return (A * self.inverse) @ self.U.T

    def solve(self, K: Tensor) -> Tensor:
        return ((K @ self.U) * self.inverse.square()) @ self.U.T


class RootCovariance(Preconditioner):
    """``E E^T = (C + lam I) / scale^2``; ``E`` is a Cholesky factor, made when first asked for.

    Where a sum of activations is indefinite by more than the ridge, or too close to singular for triangular solves,
    ``E`` comes from ``eigh`` with clamped eigenvalues.
    """

    def __init__(self, C: Tensor, ridge: float):
        self.C, self.lam = C, damping(C, ridge)
        self.width, self.dtype = len(C), C.dtype
        self.scale = (C.diagonal().mean().item() + self.lam) ** 0.5

    @cached_property
    def _factor(self) -> Tensor | _Spectral:
        """``(N, N)`` lower triangular, or what stands in for it."""
        damped = self.C.clone()
        damped.diagonal().add_(self.lam)
        L, info = torch.linalg.cholesky_ex(damped)
        pivots, least = L.diagonal(), (self.width * torch.finfo(self.dtype).eps) ** 0.5
        if not info.item() and pivots.min() > least * pivots.max():
            return L.div_(self.scale)
        del L, damped
        eigenvalues, U = torch.linalg.eigh(self.C)
        values = (eigenvalues.clamp_min(0) + self.lam).sqrt()
        fallback = _Spectral(U, values, self.scale, least * values[-1].item())
        fallback.clamped = bool(eigenvalues[0] < 0)
        return fallback

    @property
    def singular(self) -> bool:
        return isinstance(self._factor, _Spectral) and self._factor.singular

    @property
    def clamped(self) -> bool:
        """Of the factor; ``False`` where none was needed."""
        return getattr(self.__dict__.get("_factor"), "clamped", False)

    def apply(self, W: Tensor) -> Tensor:
        factor = self._factor
        return W.to(factor) @ factor if isinstance(factor, Tensor) else factor.apply(W)

    def undo(self, A: Tensor) -> Tensor:
        factor = self._factor
        if isinstance(factor, Tensor):
            return torch.linalg.solve_triangular(factor, A, upper=False, left=False)
        return factor.undo(A)

    def solve(self, K: Tensor) -> Tensor:
        factor = self._factor
        return torch.cholesky_solve(K.mT, factor).mT if isinstance(factor, Tensor) else factor.solve(K)

    def gram(self, W: Tensor) -> Tensor:
        return self.damped(quadratic(W.to(self.C), self.C), W)

    def damped(self, gram: Tensor, W: Tensor) -> Tensor:
        """:meth:`gram` out of a known ``W C W^T``, which is left as it is."""
        W = W.to(gram)
        return torch.addmm(gram, W, W.T, alpha=self.lam).div_(self.scale**2)


@torch.no_grad()
def preconditioner(
    C: Tensor, kind: str, *, ridge: float, alpha: float = 0.5, mean_abs: Tensor | None = None
) -> Preconditioner:
    r"""Choose the metric in which a layer is approximated.

    With :math:`\lambda = \text{ridge} \cdot \operatorname{mean}(\operatorname{diag} C)`, ``P`` is: ``identity``
    :math:`I`; ``hessian`` :math:`\operatorname{diag}[(C + \lambda I)^{-1}]^{-1/2}`; ``l1``
    :math:`\operatorname{diag}[E|x|]^\alpha`; ``l2`` :math:`\operatorname{diag}[C]^{1/2}`; ``covariance`` :math:`C +
    \lambda I`; ``rootcov`` :math:`(C + \lambda I)^{1/2}`. LatentLLM, Table 1 and Remark 3 (scaling has no impact), by
    which every matrix is normalised here. App. B.1 prints the l1 form without its exponent and the covariance form
    without its damping; Table 1 is followed.

    Args:
        C: ``(N, N)`` second moment ``E[x x^T]``, or the covariance when a bias is updated; any scale. fp64 is advised:
            the products made of it square the spread of the weights. Kept, not copied, by rootcov: leave it as it is.
        kind: one of :data:`PRECONDITIONERS`.
        ridge: relative damping, ``>= 0``; used by hessian, covariance and rootcov.
        alpha: exponent of the l1 form, ``> 0``.
        mean_abs: ``(N,)`` mean absolute input ``E|x|``; needed by l1 only.

    Returns:
        :class:`Preconditioner`; the identity where ``C`` is zero.

    Raises:
        ValueError: unknown kind, bad shape or range, non-finite statistics.
        torch.linalg.LinAlgError: hessian of a singular moment.

    Cost: an ``eigh`` of (N, N) for hessian and covariance; one Cholesky for rootcov, the first time it is applied.
    """
    check_moment(C, C.shape[-1])
    if kind not in PRECONDITIONERS:
        raise ValueError(f"unknown pre-conditioner {kind!r}; available: {', '.join(PRECONDITIONERS)}")
    if ridge < 0:
        raise ValueError(f"ridge must be >= 0, got {ridge}")
    if C.diagonal().mean() <= 0:  # the input is always zero: every approximation is exact, so the weight decides
        kind = "identity"
    if kind == "rootcov":
        return RootCovariance(C, ridge)
    if kind == "covariance":
        return _covariance(C, ridge)
    return _Diagonal(_diagonal(C, kind, ridge, alpha, mean_abs))


@torch.no_grad()
def input_weights(importance: Tensor) -> Preconditioner:
    r"""``P = diag(importance)^{1/2}``: every column of a weight counts by what is known of it, inputs not at all.

    FWSVD (arXiv:2207.00112, Sec. 4) with the Fisher of a column, summed over its entries.

    Args:
        importance: ``(N,)``, ``>= 0``, of any scale; fp64 is advised. All columns count alike where it is zero.

    Raises:
        ValueError: bad shape, negative or non-finite.
    """
    if importance.ndim != 1 or not torch.isfinite(importance).all() or (importance < 0).any():
        raise ValueError(f"importance must be (N,), finite and >= 0, got {tuple(importance.shape)}")
    return _Diagonal(importance.sqrt() if importance.any() else torch.ones_like(importance))


def _covariance(C: Tensor, ridge: float) -> _Spectral:
    eigenvalues, U = torch.linalg.eigh(C)
    values = eigenvalues.clamp_min(0) + damping(C, ridge)
    least = len(C) * torch.finfo(C.dtype).eps * values[-1].item()
    return _Spectral(U, values, (values.norm() / len(C) ** 0.5).item(), least)


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
