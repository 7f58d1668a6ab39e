"""Columns of a row space that make a well-conditioned block, and the rest in terms of them.

Shape legend: N columns, R rows.
"""

import torch
from torch import Tensor

from .elimination import others
from .psd import all_finite


@torch.no_grad()
def pivot_columns(Q: Tensor, candidates: int | None = None) -> Tensor:
    r"""Choose as many well-conditioned columns as there are rows: the pivots of an LU of ``Q^T``.

    Partial pivoting takes, row by row of ``Q``, the column that the rows before it explain least. On the row spaces of
    weights the chosen block is conditioned about half as well as with QR with column pivoting, for one LAPACK call
    instead of R passes over ``Q``. The worst case of LU is exponential in R, as it is for QR with pivoting, and never
    met; what is chosen has to pass :func:`eliminate`.

    Args:
        Q: ``(R, N)`` with orthonormal rows, ``R <= N``.
        candidates: only the first ``candidates`` columns may be chosen; default all.

    Returns:
        ``(R,)`` distinct column indices in the order of choice.

    Cost: O(R^2 N).
    """
    _, swaps, _ = torch.linalg.lu_factor_ex(Q[:, :candidates].T)
    return row_order(swaps, Q[:, :candidates].shape[1])[: Q.shape[0]]


def row_order(swaps: Tensor, size: int) -> Tensor:
    """Permutation that LAPACK's row swaps amount to; ``lu_unpack`` would build a ``size x size`` matrix."""
    rows = list(range(size))
    for i, j in enumerate(swaps.tolist()):
        rows[i], rows[j - 1] = rows[j - 1], rows[i]
    return torch.tensor(rows, device=swaps.device)


def split_pivots(pivots: Tensor, size: int) -> Tensor:
    """Permutation of ``range(size)``: the pivots, then the rest, both ascending."""
    return torch.cat([pivots.sort().values, others(pivots, size).nonzero()[:, 0]])


def eliminate(Q: Tensor, order: Tensor, limit: float | None, what: str, instead: str) -> tuple[Tensor, float]:
    """``X = Q_1^-1 Q_2`` for the columns ``order``, of which the first R are ``Q_1``, and the condition number of
    ``Q_1``.

    ``Q`` (R, N) has orthonormal rows, so ``Q_1 (I + X X^T) Q_1^T = I``, and the singular values of ``X`` hold those of
    ``Q_1``.

    Raises:
        torch.linalg.LinAlgError: the condition number is above the limit.
    """
    R = len(Q)
    X, info = torch.linalg.solve_ex(Q[:, order[:R]], Q[:, order[R:]])
    condition = float("inf") if info.item() or not all_finite(X) else _condition(X)
    limit = limit or (1e8 if Q.dtype == torch.float64 else 3e3)
    if not condition <= limit:
        raise torch.linalg.LinAlgError(
            f"{what}: the {R} x {R} block has condition number {condition:.1e}, "
            f"the limit is {limit:.1e}; use {instead}, a smaller rank, or raise the limit"
        )
    return X, condition


def _condition(X: Tensor) -> float:
    if not X.numel():
        return 1.0
    squares = torch.linalg.eigvalsh(X @ X.T).clamp_min(0)
    return ((1 + squares[-1]) / (1 + squares[0])).sqrt().item()
