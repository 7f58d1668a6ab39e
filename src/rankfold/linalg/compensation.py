"""Change the columns of a matrix one after another, and let the columns after each make up for it.

Optimal brain surgery (Hassibi and Stork 1993) with the columns passed held still, as in SparseGPT (arXiv:2301.00774,
Alg. 1) and GPTQ (arXiv:2210.17323, Alg. 1).

Shape legend: O output width, N input width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .psd import damping, spd_inverse

COLUMNS = 128  # between two updates of the whole matrix


def inverse_factor(C: Tensor, ridge: float) -> Tensor | None:
    """``(N, N)`` upper triangular, ``U^T U = (C + lambda I)^-1``; ``None`` where that is not positive definite.

    Args:
        C: ``(N, N)`` second moment of the inputs; fp32 or fp64, any scale. Where it is 0 all inputs count alike.
        ridge: ``lambda`` relative to the mean diagonal of ``C``, ``> 0``.
    """
    silent = not C.diagonal().any()
    inverse = spd_inverse(torch.eye(len(C)).to(C) if silent else C, shift=0.0 if silent else damping(C, ridge))
    return None if inverse is None else torch.linalg.cholesky(inverse, upper=True)


def change_columns(W: Tensor, U: Tensor, change: Callable[[int], Tensor]) -> None:
    r"""Change all columns in place, from left to right.

    What column :math:`j` loses changes those to its right by :math:`-(w_j - w'_j) U_{jk} / U_{jj}`.

    Args:
        W: ``(O, N)``.
        U: ``(N, N)`` of :func:`inverse_factor`, in the dtype of ``W``; any scale of it gives the same.
        change: called with the number of a column when all before it are done; returns ``(O,)`` what it becomes. Up to
            the next multiple of :data:`COLUMNS` the columns after it are as they are to be at that time.

    Cost: O(O N^2) time, a matrix of ``(O, COLUMNS)``.
    """
    for a in range(0, W.shape[1], COLUMNS):
        b = min(a + COLUMNS, W.shape[1])
        lost = torch.empty_like(W[:, a:b])  # over the diagonal of U
        for j in range(a, b):
            changed = change(j)
            lost[:, j - a] = (W[:, j] - changed) / U[j, j]
            W[:, j] = changed
            W[:, j + 1 : b].addr_(lost[:, j - a], U[j, j + 1 : b], alpha=-1)
        W[:, b:].addmm_(lost, U[a:b, b:], alpha=-1)
