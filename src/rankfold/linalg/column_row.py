"""Type II: keep some query-key dimensions, the same ones in queries and keys.

Shape legend: H query heads that share one key head, N head dimension, R kept dimensions.

This module imports torch only: no modules, no hooks, no device policy.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ColumnRow", "column_row", "column_row_bounds", "pair_up", "unit_scores"]


class ColumnRow(NamedTuple):
    """Result of :func:`column_row`."""

    keep: Tensor  # (R,) dimensions in half layout: the first R/2 and, at the same places, their partners
    pairs: Tensor  # (R/2,) rotary frequency of each kept pair; rotary_dim/2 where the dimensions do not turn


def unit_scores(C_q: Tensor, C_k: Tensor) -> Tensor:
    r"""Norm score of every dimension; MoDeGPT Algorithm 2, line 3, and App. B.1 for grouped queries.

    :math:`s_i = \sqrt{\sum_j \|C_{q,j}^{1/2}[:,i]\|^2 \, \|C_k^{1/2}[:,i]\|^2}`. No matrix root is needed, because
    :math:`\|C^{1/2}[:,i]\|^2 = C_{ii}`.

    Args:
        C_q: ``(H, N, N)`` second moments of the rotated queries of the group.
        C_k: ``(N, N)`` second moment of the rotated keys.

    Returns:
        ``(N,)`` scores, ``>= 0``.
    """
    energy = C_q.diagonal(dim1=-2, dim2=-1).sum(0) * C_k.diagonal()
    return energy.clamp_min(0).sqrt()


def pair_up(scores: Tensor, rotary_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Group dimensions into the pairs that must stay or go together.

    Rotary embedding turns dimension ``p`` with ``p + rotary_dim / 2`` (Hugging Face's half layout), so a kept dimension
    needs its partner; the pair's score is the sum of its two scores, with which Proposition 2 still holds (with the root
    of their squares it does not). The other dimensions are free; the best is paired with the second best, and so on,
    which keeps the choice of the top pairs equal to the choice of the top dimensions.

    Returns:
        ``(first, second, score)``, each ``(N // 2,)``: rotary pairs in order of frequency, then the free ones.

    Raises:
        ValueError: ``rotary_dim`` or the number of free dimensions is odd.
    """
    N = scores.numel()
    if rotary_dim % 2 or (N - rotary_dim) % 2:
        raise ValueError(f"rotary and free dimensions must be even in number, got {rotary_dim} and {N - rotary_dim}")
    turning = torch.arange(rotary_dim // 2, device=scores.device)
    free = scores[rotary_dim:].argsort(descending=True, stable=True) + rotary_dim
    first = torch.cat([turning, free[0::2]])
    second = torch.cat([turning + rotary_dim // 2, free[1::2]])
    return first, second, scores[first] + scores[second]


@torch.no_grad()
def column_row(C_q: Tensor, C_k: Tensor, *, rank: int, rotary_dim: int) -> ColumnRow:
    r"""Choose ``rank`` dimensions of one key head and of the queries that use it.

    Approximates :math:`Q_j K^\top \approx (Q_j S)(K S)^\top` with one column selection ``S`` for the group: CR
    decomposition of :math:`C_k^{1/2} C_{q,j}^{1/2}`, MoDeGPT Algorithm 2 and Theorem 2; one selection per key head with
    the group score of App. B.1.

    Args:
        C_q: ``(H, N, N)`` second moments of the group's queries, AFTER rotary embedding.
        C_k: ``(N, N)`` second moment of the keys, after rotary embedding.
        rank: dimensions to keep, even, ``2 <= rank <= N``.
        rotary_dim: how many leading dimensions turn (0: none, N: all).

    Raises:
        ValueError: ``rank`` is odd or out of range.

    Cost: O(H N + N log N).
    """
    N = C_k.shape[-1]
    if rank % 2 or not 2 <= rank <= N:
        raise ValueError(f"rank must be even and in [2, {N}], got {rank}")
    first, second, score = pair_up(unit_scores(C_q, C_k), rotary_dim)
    chosen = score.argsort(descending=True, stable=True)[: rank // 2].sort().values
    frequency = chosen.clamp_max(rotary_dim // 2)  # pairs past the rotary ones do not turn
    return ColumnRow(torch.cat([first[chosen], second[chosen]]), frequency)


@torch.no_grad()
def column_row_bounds(C_q: Tensor, C_k: Tensor, keep: Tensor) -> tuple[float, float]:
    r"""The paper's guarantees for a choice of dimensions, on un-normalised sums over sequences.

    Theorem 2 (Eq. 8): :math:`V \le \|C_k^{1/2}(I - SS^\top)C_q^{1/2}\|_F^2 = \sum_{i,j \in D} C_{q,ij} C_{k,ij}` over
    the dropped set ``D``, summed over the group. Proposition 2: :math:`V \le (\tfrac{N-R}{N})^2 \operatorname{tr} C_k
    \operatorname{tr} C_q`. Its printed step (b) does not follow, because queries and keys are averaged separately while the
    choice is by their product; averaging the dropped products first and applying Cauchy-Schwarz over all dimensions
    gives the same end, for pairs and groups too.

    Returns:
        ``(theorem, proposition)``.
    """
    N = C_k.shape[-1]
    dropped = torch.ones(N, dtype=torch.bool, device=C_k.device)
    dropped[keep] = False
    product = (C_q * C_k).sum(0)[dropped][:, dropped].sum().item()
    traces = C_k.diagonal().sum() * C_q.diagonal(dim1=-2, dim2=-1).sum()
    return product, ((N - keep.numel()) / N) ** 2 * traces.item()
