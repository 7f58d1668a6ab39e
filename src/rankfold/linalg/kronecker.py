"""Removing rows or columns of a layer whose Fisher is a Kronecker product: ``F = G (x) A``.

Shape legend: O outputs, N inputs of a layer, n units, c rows (columns) that belong to each, r units kept.

``A = E[x x^T]`` is the moment of the inputs and ``G = E[g g^T]`` that of the gradients at the outputs (K-FAC, Martens &
Grosse, arXiv:1503.05671). A change ``D`` of the weight costs ``tr(G D A D^T) / 2``. Written here for rows; columns are
the rows of ``W^T`` with ``A`` and ``G`` in each other's place.
"""

import torch
from torch import Tensor

from rankfold.linalg.psd import spd_inverse


def row_costs(W: Tensor, A: Tensor, blocks: Tensor) -> Tensor:
    r"""``(n,)`` cost :math:`\frac12 \operatorname{tr}(M_u W_u A W_u^\top)` of the rows of every unit.

    With :func:`diagonal_blocks` of ``G`` as ``M``: of setting them to zero (Kron-OBD of Wang et al., arXiv:1905.05934,
    K-OBD of arXiv:2312.17244). With :func:`schur_blocks`: of removing them, the other rows being updated as
    :func:`compensated` does (LLM Surgeon, arXiv:2312.17244, for one row or several).

    Args:
        W: ``(n, c, N)`` the rows of every unit.
        A: ``(N, N)`` moment of the other side, of any scale.
        blocks: ``(n, c, c)``.
    """
    W = W.double()
    return (blocks * ((W @ A.double()) @ W.mT)).sum((1, 2)) / 2


def diagonal_blocks(G: Tensor, index: Tensor) -> Tensor:
    """``(n, c, c)`` blocks of ``G`` ``(O, O)`` that belong to the rows ``index`` ``(n, c)``."""
    return G[index[:, :, None], index[:, None, :]]


def schur_blocks(G: Tensor, index: Tensor) -> Tensor:
    """``(n, c, c)`` inverses of the blocks of ``G^-1``: what of every block of ``G`` all other rows cannot make up for.

    Args:
        G: ``(O, O)`` positive definite.

    Raises:
        torch.linalg.LinAlgError: it is not.
    """
    inverse = spd_inverse(G)
    if inverse is None:
        raise torch.linalg.LinAlgError(f"the Fisher factor {tuple(G.shape)} is not positive definite; use more tokens")
    return torch.linalg.inv(diagonal_blocks(inverse, index))


@torch.no_grad()
def compensated(W: Tensor, G: Tensor, keep: Tensor, drop: Tensor) -> Tensor:
    r"""``(r c, N)`` rows that stay, changed so that the loss of the others costs least:
    :math:`W_K + G_{KK}^{-1} G_{KR} W_R`.

    The minimiser of ``tr(G D A D^T)`` over changes ``D`` with :math:`D_R = -W_R`, whatever ``A`` is: the update of
    Optimal Brain Surgeon for all removed rows together, "correlated" in LLM Surgeon (arXiv:2312.17244).

    Args:
        W: ``(O, N)``.
        G: ``(O, O)`` positive definite.
        keep, drop: rows.

    Raises:
        torch.linalg.LinAlgError: ``G`` is not positive definite.
    """
    W, rest = W.double(), G[keep][:, keep]
    factor, info = torch.linalg.cholesky_ex(rest)
    if info.item():
        raise torch.linalg.LinAlgError(f"the Fisher factor {tuple(G.shape)} is not positive definite; use more tokens")
    return W[keep] + torch.cholesky_solve(G[keep][:, drop] @ W[drop], factor)


def with_bias(W: Tensor, bias: Tensor | None) -> Tensor:
    """``(O, N + 1)``, fp64: the weight and, as what an input of one meets, its bias; 0 where there is none."""
    last = W.new_zeros(len(W)) if bias is None else bias
    return torch.cat([W, last[:, None]], 1).double()


def with_one(C: Tensor, mean: Tensor) -> Tensor:
    """``(N + 1, N + 1)`` second moment of an input with a one after it.

    Args:
        C: ``(N, N)`` second moment.  mean: ``(N,)``.
    """
    whole = C.new_ones(len(C) + 1, len(C) + 1)
    whole[:-1, :-1], whole[:-1, -1], whole[-1, :-1] = C, mean, mean
    return whole
