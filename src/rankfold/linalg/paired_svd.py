"""Type III: the best rank-R replacement of a pair of projections with nothing between them.

Shape legend: N width between the two projections (head dimension), R kept width, ... any batch of heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .psd import all_finite


class PairedSVD(NamedTuple):
    """The best pair of one rank (:func:`paired_factors`): put ``down @ v`` in place of ``v``, ``X @ up`` of ``X``."""

    down: Tensor  # (..., R, N)
    up: Tensor  # (..., N, R)
    singular_values: Tensor  # (..., N) descending; the squares past R are the error
    error: Tensor  # (...) E||X v - X up down v||^2 in the units of the moments
    relative_error: Tensor  # (...)


class PairedFactors(NamedTuple):
    """Result of :func:`paired_factors`: what the pairs of all ranks are cut from."""

    root_A: Tensor  # (..., N, N)
    inverse_A: Tensor  # (..., N, N) of the root
    singular_values: Tensor  # (..., N) of B^(1/2) A^(1/2), descending
    Vh: Tensor  # (..., N, N) its right singular vectors

    def truncated(self, rank: int) -> PairedSVD:
        """Return the pair of this rank.

        Raises:
            ValueError: ``rank`` is not in ``[1, N]``.
        """
        N = self.Vh.shape[-1]
        if not 1 <= rank <= N:
            raise ValueError(f"rank must be in [1, {N}], got {rank}")
        V_r = self.Vh[..., :rank, :]
        down, up = V_r @ self.inverse_A, self.root_A @ V_r.mT
        sign = torch.where(down.gather(-1, down.abs().argmax(-1, keepdim=True)) < 0, -1.0, 1.0).to(down)
        energy = self.singular_values.square()
        error, total = energy[..., rank:].sum(-1), energy.sum(-1)
        relative = (error / total.clamp_min(torch.finfo(total.dtype).tiny)).sqrt()
        return PairedSVD(down * sign, up * sign.mT, self.singular_values, error, relative)


@torch.no_grad()
def paired_factors(A: Tensor, B: Tensor) -> PairedFactors:
    r"""Best projection pair between a vector ``v`` with moment ``A`` and a matrix ``X`` with Gram ``B``.

    Solves :math:`\min_{U D} \mathbb{E}\|X v - X U D v\|^2` over ``U (N, R)``, ``D (R, N)``, where
    :math:`A = \mathbb{E}[v v^\top]` and :math:`B = X^\top X`. The minimiser is the truncated SVD of
    :math:`B^{1/2} A^{1/2}`: with its top right singular vectors ``V_r``, :math:`D = V_r^\top A^{-1/2}` and
    :math:`U = A^{1/2} V_r`.

    With ``v = W_v x`` and ``X = W_o`` of one head this is MoDeGPT Theorem 3 (Algorithm 3), from ``N x N`` matrices
    instead of a ``d x d`` root. With ``B`` summed over the query heads that share a value head it is the joint optimum
    for grouped queries, where the paper's App. B.1 ignores the output projections; that form is ``B = I``. (App. B.1
    prints the SVD of ``C W_V`` and takes ``U_k``, which does not multiply; here it is that of ``C^(1/2) W_V``, as in
    Algorithm 3, and its right singular vectors.) With the queries' moment as ``B`` it is the optimal query-key pair
    where nothing sits between them (no rotary embedding).

    Args:
        A: ``(..., N, N)`` second moment of ``v``; any batch of heads.
        B: ``(..., N, N)`` Gram of ``X``, same dtype.

    Raises:
        ValueError: shapes disagree, entries not finite.

    Cost: O(N^3) a head, once for all ranks. Signs are fixed: the largest entry of each row of ``down`` is positive.
    """
    N = A.shape[-1]
    for name, M in (("A", A), ("B", B)):
        if M.shape[-2:] != (N, N) or M.shape != A.shape:
            raise ValueError(f"{name} must be {(*A.shape[:-2], N, N)}, got {tuple(M.shape)}")
        if not all_finite(M):
            raise ValueError(f"{name} has non-finite entries; were the activations accumulated in fp16?")
    root_A, inverse_A = _root(A)
    root_B, _ = _root(B)
    _, S, Vh = torch.linalg.svd(root_B @ root_A)
    return PairedFactors(root_A, inverse_A, S, Vh)


def _root(A: Tensor) -> tuple[Tensor, Tensor]:
    """``A^(1/2)`` and its pseudo-inverse for a batch; :func:`rankfold.linalg.psd.psd_root` takes one matrix."""
    values, U = torch.linalg.eigh(A)
    values = values.clamp_min(0)
    alive = values > A.shape[-1] * torch.finfo(A.dtype).eps * values[..., -1:]
    root = values.sqrt()
    inverse = torch.where(alive, 1 / root.clamp_min(torch.finfo(A.dtype).tiny), torch.zeros_like(root))
    return (U * root[..., None, :]) @ U.mT, (U * inverse[..., None, :]) @ U.mT
