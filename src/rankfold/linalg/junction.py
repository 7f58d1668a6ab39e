"""The freedom between two factors: same product, fewer numbers.

Shape legend: O output width, N input width, R rank; h head dim, H query heads, K key heads, r_q, r_k latent widths.

``B A = (B J)(J^-1 A)`` for every invertible ``J``. A good ``J`` makes one factor contain an identity block (after a
permutation), which is neither stored nor multiplied: ``R (O + N) - R^2`` numbers instead of ``R (O + N)``, and always
fewer than ``O N``.

Scale. ``J`` is the only scale freedom there is. ``symmetric`` uses it to give column ``i`` of ``B`` and row ``i`` of
``A`` equal norms. ``block_identity_*`` and ``lu`` have none left: there pivoting bounds the entries. With an identity
block in ``A``, ``B`` is a set of columns of ``B A`` itself, so as large as the weight, and ``A2`` has entries that
are typically of order one; ``lu`` has entries at most 1 in ``B``. All are safe in bf16.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rankfold.linalg.pivots import eliminate, pivot_columns, row_order, split_pivots
from rankfold.linalg.psd import all_finite

Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None, float]  # what is in a Junction besides its kind
JUNCTIONS = ("left", "right", "symmetric", "block_identity_left", "block_identity_right", "lu")


class Junction(NamedTuple):
    """Result of :func:`apply_junction`: what the runtime stores. ``p = columns``, ``q = rows``."""

    kind: str
    B: Tensor  # (O, R); block_identity_left: (O - R, R), y[q[:R]] = z and y[q[R:]] = B z
    A: Tensor  # (R, N); block_identity_right: (R, N - R), z = x[p[:R]] + A x[p[R:]]
    columns: Tensor | None  # (N,) order of the inputs; block_identity_right, lu (z = A x[p])
    rows: Tensor | None  # (O,) order of the outputs; block_identity_left, lu (y[q] = B z)
    condition: float  # of the R x R block that was inverted, in an orthonormal basis; 1 if none was


class HeadJunction(NamedTuple):
    """Result of :func:`head_block_identity`: ``k_g = z[p[:h]] + B_k2[g] z[p[h:]] + b_k[g]`` with ``p = order[g]``."""

    order: Tensor  # (K, r_k)
    B_k2: Tensor  # (K, h, r_k - h)
    B_q: Tensor  # (H, h, r_q)
    b_q: Tensor | None
    b_k: Tensor | None
    condition: float  # worst head


@torch.no_grad()
def apply_junction(B: Tensor, A: Tensor, kind: str, *, limit: float | None = None) -> Junction:
    r"""Rewrite ``B A`` with a junction matrix.

    LatentLLM Sec. 3.3 and App. A.2. ``left``: ``J = I``, the singular values stay in ``B``; ``right``: unit columns
    in ``B`` (``J = S^+``); ``symmetric``: equal norms (``J = S^(-1/2)`` for ``P = I``; for other pre-conditioners the
    paper's form balances ``B`` against ``A P``, not against the stored ``A``); ``block_identity_right``: identity in
    ``A`` (Eq. 9, Remark 4); ``block_identity_left``: identity in ``B``; ``lu``: both triangular (Remark 5). App. A.2
    writes ``J = [V]_{:r}``, for ``P = I``, where Eq. 8 has ``[V P^+]_{:r}``; Eq. 8 is followed.

    The row space of ``A`` is orthonormalised first, so a rank-deficient ``A`` is no problem. Work is done in the dtype
    of ``B`` (fp32 if that is shorter): pass unrounded factors.

    Args:
        B: ``(O, R)``.
        A: ``(R, N)``, ``R <= min(O, N)``.
        kind: one of :data:`JUNCTIONS`.
        limit: largest condition number of the inverted block; default 1e8 in fp64, 3e3 in fp32.

    Returns:
        :class:`Junction`, tensors in the dtype of ``B``. Pivots and the rest are both in ascending order.

    Raises:
        ValueError: unknown kind, shapes disagree, non-finite factors.
        torch.linalg.LinAlgError: the block is worse conditioned than ``limit``.

    Cost: O(R^2 (O + N)): of an identity block one side is inverted and the other multiplied.
    """
    if kind not in JUNCTIONS:
        raise ValueError(f"unknown junction {kind!r}; available: {', '.join(JUNCTIONS)}")
    _check_factors(B, A)
    dtype, work = B.dtype, B.dtype if B.dtype == torch.float64 else torch.float32
    B, A = B.to(work), A.to(work)
    if kind == "block_identity_right":
        parts = _identity_in_A(B, A, kind, limit)
    elif kind == "block_identity_left":
        mirror = _identity_in_A(A.T, B.T, kind, limit)
        parts = (mirror[1].T, mirror[0].T, None, mirror[2], mirror[4])
    elif kind == "lu":
        parts = _triangular(B, A)
    else:
        parts = (*_rescale(B, A, kind), None, None, 1.0)
    B, A, columns, rows, condition = parts
    return Junction(kind, B.to(dtype).contiguous(), A.to(dtype).contiguous(), columns, rows, condition)


def stored_numbers(kind: str, out: int, in_: int, rank: int) -> int:
    """Numbers a junction stores: ``rank (out + in)``, minus ``rank^2`` for an identity block or two triangles (Eq. 9).

    Permutations (one or two index vectors) are not counted, as in the paper; the unit diagonal of ``lu`` is not
    stored.

    Raises:
        ValueError: unknown kind, or ``rank`` out of range.
    """
    if kind not in JUNCTIONS:
        raise ValueError(f"unknown junction {kind!r}; available: {', '.join(JUNCTIONS)}")
    if not 1 <= rank <= min(out, in_):
        raise ValueError(f"rank must be in [1, {min(out, in_)}] for a ({out}, {in_}) weight, got {rank}")
    saved = 0 if kind in ("left", "right", "symmetric") else rank * rank
    return rank * (out + in_) - saved


@torch.no_grad()
def head_block_identity(
    B_q: Tensor, B_k: Tensor, *, b_q: Tensor | None = None, b_k: Tensor | None = None, limit: float | None = None
) -> HeadJunction:
    r"""Per-head junction ``J_g`` that puts an identity into every ``B_k``: saves ``h^2`` numbers per key head.

    ``B_k,g <- J_g^{-1} B_k,g = [I, B_k2]`` after a permutation, ``B_q,i <- J_g^T B_q,i``: LatentLLM Eq. 79-80. Put
    into ``B_k`` because the queries of a group share it. **Not for RoPE**, which the paper does not say: ``J_g``
    would have to commute with every rotation. For value-output (Eq. 187-188, whatever the keys do) pass the columns of
    the output projection that meet head ``i`` as rows of ``B_q`` and ``B_v`` as ``B_k``.

    Args:
        B_q: ``(H, h, r_q)``.
        B_k: ``(K, h, r_k)``, ``r_k >= h``.
        b_q, b_k: ``(H, h)``, ``(K, h)`` biases.
        limit: largest condition number; default 1e8 in fp64, 3e3 in fp32.

    Raises:
        ValueError: ``r_k < h`` or heads do not divide.
        torch.linalg.LinAlgError: a head's block is worse conditioned than ``limit``.
    """
    (H, h, _), (K, _, r_k) = B_q.shape, B_k.shape
    if r_k < h:
        raise ValueError(f"a per-head junction needs r_k >= {h} (the head dim), got {r_k}")
    if H % K:
        raise ValueError(f"{H} query heads cannot share {K} key heads evenly")
    columns = [B_k] if b_k is None else [B_k, b_k[..., None]]  # the bias goes along, but is never a pivot
    orders, stored, blocks, conditions = [], [], [], []
    for g, M in enumerate(torch.cat(columns, 2)):
        Q = torch.linalg.qr(M.T).Q
        order = split_pivots(pivot_columns(Q.T, r_k), M.shape[1])
        rest, condition = eliminate(Q.T, order, limit, f"per-head junction of key head {g}", "no per-head junction")
        conditions.append(condition)
        orders.append(order[:r_k])
        stored.append(rest)
        blocks.append(M[:, order[:h]])
    stored, J = torch.stack(stored), torch.stack(blocks).repeat_interleave(H // K, 0)
    new_q = J.mT @ B_q
    new_b_q = None if b_q is None else (J.mT @ b_q[..., None])[..., 0]
    new_b_k = None if b_k is None else stored[..., -1]
    return HeadJunction(torch.stack(orders), stored[..., : r_k - h], new_q, new_b_q, new_b_k, max(conditions))


def _identity_in_A(B: Tensor, A: Tensor, kind: str, limit: float | None) -> Parts:
    R, N = A.shape
    Q = torch.linalg.qr(A.T).Q.T
    order = split_pivots(pivot_columns(Q), N)
    rest, condition = eliminate(Q, order, limit, f"junction {kind!r}", "kind='symmetric' or 'lu'")
    return B @ A[:, order[:R]], rest, order, None, condition


def _triangular(B: Tensor, A: Tensor) -> Parts:
    """``B[rows]`` unit lower trapezoid, entries at most 1; ``A[:, columns]`` upper trapezoid. Nothing is inverted."""
    Q, L = torch.linalg.qr(A.T)
    columns = split_pivots(pivot_columns(Q.T), A.shape[1])
    basis, upper = torch.linalg.qr(Q.T[:, columns])  # (R, R), (R, N)
    packed, swaps, _ = torch.linalg.lu_factor_ex(B @ (L.T @ basis))  # nothing is solved with it
    R = packed.shape[1]
    lower = packed.tril(-1)
    lower.diagonal().fill_(1)
    rows = row_order(swaps, len(packed))
    return lower, (packed[:R].triu() @ upper).triu(), columns, rows, 1.0


def _rescale(B: Tensor, A: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    if kind == "left":
        return B, A
    tiny = torch.finfo(B.dtype).tiny
    size = B.norm(dim=0).clamp_min(tiny)
    if kind == "symmetric":
        size = (size / A.norm(dim=1).clamp_min(tiny)).sqrt().clamp_min(tiny)
    return B / size, A * size[:, None]


def _check_factors(B: Tensor, A: Tensor) -> None:
    if B.ndim != 2 or A.ndim != 2 or B.shape[1] != A.shape[0]:
        raise ValueError(f"B (out, r) and A (r, in) must share r, got {tuple(B.shape)} and {tuple(A.shape)}")
    if B.shape[1] > min(B.shape[0], A.shape[1]):
        raise ValueError(
            f"rank {B.shape[1]} exceeds the smaller side of a ({B.shape[0]}, {A.shape[1]}) product; use low_rank first"
        )
    if not (all_finite(B) and all_finite(A)):
        raise ValueError("B or A has non-finite entries")
