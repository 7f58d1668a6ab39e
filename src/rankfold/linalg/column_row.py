"""Type II: keep some query-key dimensions, the same ones in queries and keys.

Shape legend: H query heads that share one key head, N head dimension, R kept dimensions, ... any batch of key heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .elimination import eliminate_groups


class ColumnRow(NamedTuple):
    """Result of :func:`column_row` and :func:`eliminate_pairs`."""

    keep: Tensor  # (..., R) dimensions in half layout: the first R/2 and, at the same places, their partners
    pairs: Tensor  # (..., R/2) rotary frequency of each kept pair; rotary_dim/2 where the dimensions do not turn


def unit_scores(C_q: Tensor, C_k: Tensor) -> Tensor:
    r"""Norm score of every dimension; MoDeGPT Algorithm 2, line 3, and App. B.1 for grouped queries.

    :math:`s_i = \sqrt{\sum_j \|C_{q,j}^{1/2}[:,i]\|^2 \, \|C_k^{1/2}[:,i]\|^2}`. No matrix root is needed, because
    :math:`\|C^{1/2}[:,i]\|^2 = C_{ii}`.

    Args:
        C_q: ``(..., H, N, N)`` second moments of the rotated queries of the group.
        C_k: ``(..., N, N)`` second moment of the rotated keys.

    Returns:
        ``(..., N)`` scores, ``>= 0``.
    """
    energy = C_q.diagonal(dim1=-2, dim2=-1).sum(-2) * C_k.diagonal(dim1=-2, dim2=-1)
    return energy.clamp_min(0).sqrt()


def pair_up(scores: Tensor, rotary_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Group dimensions into the pairs that must stay or go together.

    Rotary embedding turns dimension ``p`` with ``p + rotary_dim / 2`` (Hugging Face's half layout), so a kept dimension
    needs its partner; the pair's score is the sum of its two scores, with which Proposition 2 still holds (with the
    root of their squares it does not). The other dimensions are free; the best is paired with the second best, and so
    on, which keeps the choice of the top pairs equal to the choice of the top dimensions.

    Returns:
        ``(first, second, score)``, each ``(..., N // 2)``: rotary pairs in order of frequency, then the free ones.

    Raises:
        ValueError: ``rotary_dim`` or the number of free dimensions is odd.
    """
    _check_even(scores.shape[-1], rotary_dim)
    turning = torch.arange(rotary_dim // 2, device=scores.device).expand(*scores.shape[:-1], -1)
    free = scores[..., rotary_dim:].argsort(dim=-1, descending=True, stable=True) + rotary_dim
    first = torch.cat([turning, free[..., 0::2]], -1)
    second = torch.cat([turning + rotary_dim // 2, free[..., 1::2]], -1)
    return first, second, scores.gather(-1, first) + scores.gather(-1, second)


@torch.no_grad()
def column_row(C_q: Tensor, C_k: Tensor, *, rank: int, rotary_dim: int) -> ColumnRow:
    r"""Choose ``rank`` dimensions of one key head and of the queries that use it.

    Approximates :math:`Q_j K^\top \approx (Q_j S)(K S)^\top` with one column selection ``S`` for the group: CR
    decomposition of :math:`C_k^{1/2} C_{q,j}^{1/2}`, MoDeGPT Algorithm 2 and Theorem 2; one selection per key head with
    the group score of App. B.1.

    Args:
        C_q: ``(..., H, N, N)`` second moments of the group's queries, AFTER rotary embedding.
        C_k: ``(..., N, N)`` second moment of the keys, after rotary embedding.
        rank: dimensions to keep, even, ``2 <= rank <= N``.
        rotary_dim: how many leading dimensions turn (0: none, N: all).

    Raises:
        ValueError: ``rank`` is odd or out of range.

    Cost: O(H N + N log N) a key head.
    """
    _check_rank(rank, C_k.shape[-1])
    first, second, score = pair_up(unit_scores(C_q, C_k), rotary_dim)
    chosen = score.argsort(dim=-1, descending=True, stable=True)[..., : rank // 2].sort(-1).values
    frequency = chosen.clamp_max(rotary_dim // 2)  # pairs past the rotary ones do not turn
    return ColumnRow(torch.cat([first.gather(-1, chosen), second.gather(-1, chosen)], -1), frequency)


@torch.no_grad()
def eliminate_pairs(M: Tensor, *, rank: int, rotary_dim: int) -> ColumnRow:
    r"""Choose ``rank`` dimensions by the exact error of the scores, pairs that turn together staying together.

    Dropping the set ``D`` changes the scores of the group by :math:`\sum_{i,j \in D} M_{ij}`, with :math:`M = \sum_n
    (Q_n^\top Q_n) \circ (\tilde K_n^\top \tilde K_n)` summed over windows and over the queries of the group. With
    :math:`\tilde K` the keys minus their mean over the window this is the change that softmax sees: a shift that all
    keys of a query share leaves it as it is, and in models whose keys have large biases nearly all their energy is such
    a shift.

    Args:
        M: ``(..., N, N)``.
        rank: dimensions to keep, even, ``2 <= rank <= N``.
        rotary_dim: how many leading dimensions turn (0: none, N: all); the others go one by one.

    Raises:
        ValueError: ``rank`` is odd or out of range, or an odd number of dimensions turns.

    Cost: that of :func:`rankfold.linalg.elimination.eliminate_groups`.
    """
    N, half = M.shape[-1], rotary_dim // 2
    _check_rank(rank, N)
    _check_even(N, rotary_dim)
    # Rows of `members`: the dimensions of a group, a pair or one that does not turn.
    pairs, free = torch.arange(half, device=M.device), torch.arange(rotary_dim, N, device=M.device)
    members = torch.zeros(half + len(free), N, dtype=M.dtype, device=M.device)
    members[pairs, pairs] = members[pairs, pairs + half] = 1.0
    members[half + torch.arange(len(free), device=M.device), free] = 1.0
    stay = eliminate_groups(members @ M @ members.T, N - rank, members.sum(1).long())
    kept = [_in_half_layout(groups, half) for groups in stay.view(-1, stay.shape[-1]).tolist()]
    keep, frequencies = (
        torch.tensor(rows, device=M.device).view(*M.shape[:-2], -1) for rows in zip(*kept, strict=True)
    )
    return ColumnRow(keep, frequencies)


def relative_cost(M: Tensor) -> Tensor:
    r"""Cost of dropping dimensions from all heads of a block alike, as a share of the energy of its scores.

    The sum of this over blocks is what :func:`eliminate_pairs` takes to choose one set of dimensions for all of them:
    it then minimises the sum of their squared relative errors,
    :math:`\sum_b \sum_{i,j \in D} M^b_{ij} / \sum_{i,j} M^b_{ij}`.

    Args:
        M: ``(H, N, N)`` of all heads of a block, as in :func:`eliminate_pairs`.

    Returns:
        ``(N, N)``, fp64; zeros where all scores of a query are the same anyway.
    """
    cost = M.double().sum(0)
    return cost / cost.sum() if cost.sum() > 0 else torch.zeros_like(cost)


def _in_half_layout(stay: list[bool], half: int) -> tuple[list[int], list[int]]:
    """Kept dimensions and frequencies of one head: pairs that turn first, then those that do not, two by two."""
    pairs = [p for p in range(half) if stay[p]]
    free = [half + g for g in range(half, len(stay)) if stay[g]]  # group g past the pairs is dimension g + half
    first, second = [*pairs, *free[::2]], [*(p + half for p in pairs), *free[1::2]]
    return first + second, [*pairs, *[half] * (len(free) // 2)]


def _check_rank(rank: int, N: int) -> None:
    if rank % 2 or not 2 <= rank <= N:
        raise ValueError(f"rank must be even and in [2, {N}], got {rank}")


def _check_even(N: int, rotary_dim: int) -> None:
    if rotary_dim % 2 or (N - rotary_dim) % 2:
        raise ValueError(f"rotary and free dimensions must be even in number, got {rotary_dim} and {N - rotary_dim}")


@torch.no_grad()
def column_row_bounds(C_q: Tensor, C_k: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    r"""The paper's guarantees for a choice of dimensions, on un-normalised sums over sequences.

    Theorem 2 (Eq. 8): :math:`V \le \|C_k^{1/2}(I - SS^\top)C_q^{1/2}\|_F^2 = \sum_{i,j \in D} C_{q,ij} C_{k,ij}` over
    the dropped set ``D``, summed over the group. Proposition 2: :math:`V \le (\tfrac{N-R}{N})^2 \operatorname{tr} C_k
    \operatorname{tr} C_q`. Its printed step (b) does not follow, because queries and keys are averaged separately while
    the choice is by their product; averaging the dropped products first and applying Cauchy-Schwarz over all dimensions
    gives the same end, for pairs and groups too, where the choice is by the norm scores. (The paper prints the width
    of the model in place of the head dimension ``N``.)

    Args:
        C_q: ``(..., H, N, N)``.  C_k: ``(..., N, N)``.  keep: ``(..., R)``.

    Returns:
        ``(theorem, proposition)``, each ``(...)``.
    """
    N = C_k.shape[-1]
    dropped = torch.ones(*keep.shape[:-1], N, dtype=C_k.dtype, device=C_k.device).scatter(-1, keep, 0.0)
    product = (C_q.sum(-3) * C_k * dropped[..., :, None] * dropped[..., None, :]).sum((-2, -1))
    traces = C_k.diagonal(dim1=-2, dim2=-1).sum(-1) * C_q.diagonal(dim1=-2, dim2=-1).sum((-2, -1))
    return product, ((N - keep.shape[-1]) / N) ** 2 * traces
