"""Roots of second moments that real activations made.

Shape legend: N width of the moment.

Every function here takes a symmetric positive semi-definite matrix that was *summed* from activations. Such a sum is
only semi-definite up to rounding: a few massive activations put eigenvalues nine orders of magnitude apart, and fp32
products leave the smallest ones slightly negative. So roots go through ``eigh`` with clamped eigenvalues; Cholesky is
used only where a ridge has been added.
"""

from typing import NamedTuple

import torch
from torch import Tensor

CACHE_LINE = 64  # bytes
ROWS = 512  # of a product with a moment that are made at a time
WIDE = 1024  # of a moment from which on what is only compared is computed in fp32 (:func:`choosing`)


class PSDRoot(NamedTuple):
    """Result of :func:`psd_root`; all matrices symmetric, dtype of the input."""

    root: Tensor  # (N, N), C^(1/2)
    inverse: Tensor  # (N, N), Moore-Penrose inverse of ``root``
    eigenvalues: Tensor  # (N,), ascending, clamped at 0
    rank: int  # eigenvalues above the cut-off


def all_finite(x: Tensor) -> bool:
    """Whether no entry is NaN or infinite. ``isfinite`` would allocate another ``x``, which shows at moments' size."""
    return not x.numel() or bool(torch.stack(torch.aminmax(x)).isfinite().all())


def check_moment(C: Tensor, size: int, *, name: str = "C") -> None:
    """Raise unless ``C`` is a finite ``(size, size)`` matrix.

    Raises:
        ValueError: wrong shape, or entries that are NaN or infinite.
    """
    if C.shape != (size, size):
        raise ValueError(f"{name} must be ({size}, {size}), got {tuple(C.shape)}")
    if not all_finite(C):
        raise ValueError(f"{name} has non-finite entries; were the activations accumulated in fp16?")


def damping(C: Tensor, ridge: float) -> float:
    """``ridge * mean(diag C)``, ``lambda`` everywhere: relative, so that no result depends on the scale of ``C``."""
    return ridge * C.diagonal().mean().clamp_min(0).item()


def quadratic(W: Tensor, C: Tensor) -> Tensor:
    """``W C W^T`` (O, O) for ``W`` (O, N), symmetric ``C`` (N, N); exactly symmetric, ``O N`` numbers never at once."""
    K = W.new_empty(len(W), len(W))
    for a in range(0, len(W), ROWS):
        b = min(a + ROWS, len(W))
        K[a:b, :b] = (W[a:b] @ C) @ W[:b].T
        K[:a, a:b] = K[a:b, :a].T
        K[a:b, a:b] = (K[a:b, a:b] + K[a:b, a:b].T) / 2
    return K


def energy(W: Tensor, C: Tensor) -> Tensor:
    """``tr(W C W^T)`` of ``W`` (O, N) and a symmetric ``C`` (N, N), in fp64; products in the dtype of ``W``.

    Only the upper triangle of ``C`` is read, which halves the operations; of a copy in another dtype there are ``ROWS``
    rows.
    """
    found = torch.zeros((), dtype=torch.float64, device=W.device)
    for a in range(0, W.shape[1], ROWS):
        b = min(a + ROWS, W.shape[1])
        products = (W[:, a:b] @ C[a:b, a:].to(W.dtype)).mul_(W[:, a:])
        found += 2 * products.sum(dtype=torch.float64) - products[:, : b - a].sum(dtype=torch.float64)
    return found


def relative(error: float, total: float) -> float:
    """RMS error over RMS of what it is an error of, both given as squares; 0 where that is nothing."""
    return (max(error, 0.0) / total) ** 0.5 if total > 0 else 0.0


def choosing(C: Tensor) -> torch.dtype:
    """The dtype of what is only compared or reported and goes by a moment ``C`` (N, N): errors at every rank, ridges.

    Weights are fitted in the dtype of ``C`` all the same. fp32 takes half the time and memory, and where fp64 is slow a
    fraction of that; of narrow moments both take little.
    """
    return torch.float32 if len(C) >= WIDE else C.dtype


@torch.no_grad()
def psd_root(C: Tensor, *, ridge: float = 0.0, cutoff: float | None = None) -> PSDRoot:
    r"""Symmetric square root of a second moment and its pseudo-inverse.

    Computes :math:`(C + \lambda I)^{1/2}` with
    :math:`\lambda = \text{ridge} \cdot \operatorname{mean}(\operatorname{diag} C)` from one ``eigh``; eigenvalues below
    ``cutoff * max`` are treated as zero in the inverse.

    Args:
        C: ``(N, N)`` symmetric, positive semi-definite up to rounding; fp32 or fp64, any positive scale.
        ridge: relative damping, ``>= 0``; scaling ``C`` by ``c`` scales the result by ``sqrt(c)`` exactly.
        cutoff: relative eigenvalue cut-off of the inverse; default ``N * eps`` of the dtype, numpy's rule.

    Raises:
        ValueError: ``C`` is not square or not finite.

    Cost: O(N^3) time, O(N^2) memory.
    """
    N = C.shape[-1]
    check_moment(C, N)
    eigenvalues, U = torch.linalg.eigh(C)
    eigenvalues = eigenvalues.clamp_min(0) + damping(C, ridge)
    if cutoff is None:
        cutoff = N * torch.finfo(C.dtype).eps
    alive = eigenvalues > cutoff * eigenvalues[-1]
    sqrt = eigenvalues.sqrt()
    inverse = torch.where(alive, 1 / sqrt.clamp_min(torch.finfo(C.dtype).tiny), torch.zeros_like(sqrt))
    return PSDRoot((U * sqrt) @ U.T, (U * inverse) @ U.T, eigenvalues, int(alive.sum()))


class Factor(NamedTuple):
    """Result of :func:`spd_factor`: the lower Cholesky factor ``L`` (N, N), with rows of the identity appended."""

    padded: Tensor  # (N + n, N + n), column-major
    size: int  # N

    def forward(self, B: Tensor) -> Tensor:
        """``L^-1 B`` of ``B`` (N, K)."""
        return self._lower(self._rows(B))[: self.size]

    def backward(self, B: Tensor) -> Tensor:
        """``L^-T B`` of ``B`` (N, K)."""
        return self._upper(self._rows(B))[: self.size]

    def solve(self, B: Tensor) -> Tensor:
        """``(L L^T)^-1 B`` of ``B`` (N, K)."""
        return self._upper(self._lower(self._rows(B)))[: self.size]

    def _rows(self, B: Tensor) -> Tensor:
        """A copy of the shape and in the order in which solving copies nothing, the factor least of all."""
        rows = B.new_zeros(B.shape[1], len(self.padded)).mT
        rows[: self.size] = B
        return rows

    def _lower(self, rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.padded, rows, upper=False, out=rows)

    def _upper(self, rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.padded.mT, rows, upper=True, out=rows)


def spd_factor(A: Tensor, *, shift: float = 0.0, dtype: torch.dtype | None = None) -> Factor | None:
    """Lower Cholesky factor of a symmetric ``A + shift I``, ``None`` where that is not positive definite.

    Args:
        A: ``(N, N)``, fp32 or fp64.
        dtype: of the factor; that of ``A`` by default.

    Cost: N^3 / 3 flops, one ``(N, N)`` copy, which becomes the factor.
    """
    padded = _padded_factor(A, shift, dtype or A.dtype)
    return None if padded is None else Factor(padded, len(A))


def spd_inverse(A: Tensor, *, shift: float = 0.0, dtype: torch.dtype | None = None) -> Tensor | None:
    """Inverse of a symmetric ``A + shift I`` by Cholesky, ``None`` where that is not positive definite.

    Args:
        A: ``(N, N)``, fp32 or fp64.
        dtype: of the inverse; that of ``A`` by default.

    Cost: N^3 flops, one ``(N, N)`` copy, which becomes the result (a view of it).
    """
    padded = _padded_factor(A, shift, dtype or A.dtype)
    return None if padded is None else torch.cholesky_inverse(padded, out=padded)[: len(A), : len(A)]


def _padded_factor(A: Tensor, shift: float, dtype: torch.dtype) -> Tensor | None:
    """The factor, with a few rows of the identity appended: rows whose length is a multiple of a memory page, as the
    widths of models make them, fall on the same cache sets, and MKL's Cholesky takes up to three times as long
    (docs/results/cholesky.md)."""
    N = len(A)
    padded = torch.eye(N + CACHE_LINE // dtype.itemsize, dtype=dtype, device=A.device)
    padded[:N, :N] = A
    padded.diagonal()[:N].add_(shift)
    columns = padded.mT  # LAPACK's order, so that it works in place
    info = torch.empty((), dtype=torch.int32, device=A.device)
    torch.linalg.cholesky_ex(columns, out=(columns, info))
    return None if info.item() else columns


def damped(C: Tensor, ridge: float, *, name: str = "the second moment") -> Tensor:
    """``C + lambda I``, ``lambda`` relative to its mean diagonal; ``I`` where ``C`` is 0: all directions count alike.

    Raises:
        ValueError: not square or not finite, with its name.
    """
    check_moment(C, len(C), name=name)
    if not C.diagonal().any():
        return torch.eye(len(C), dtype=C.dtype, device=C.device)
    found = C.clone()
    found.diagonal().add_(damping(C, ridge))
    return found


@torch.no_grad()
def metric_root(G: Tensor, *, ridge: float) -> Tensor:
    r"""``R`` with :math:`R^\top R = G + \lambda I`, so that :math:`\|R y\|^2` is the length of ``y`` in that metric.

    Upper triangular, by Cholesky: any root serves where only products count, and ``eigh`` would take ten times as long.

    Args:
        G: ``(D, D)`` second moment, fp32 or fp64, any positive scale. Where it is 0 all directions count alike:
            ``R = I``.
        ridge: ``lambda`` relative to the mean diagonal of ``G``, ``> 0``.

    Raises:
        ValueError: ``G`` is not square or not finite.
        torch.linalg.LinAlgError: it is not positive definite even so.
    """
    root, info = torch.linalg.cholesky_ex(damped(G, ridge, name="G"), upper=True)
    if info.item():
        raise torch.linalg.LinAlgError(f"the output metric {tuple(G.shape)} is not positive definite; use more tokens")
    return root
