"""Choose what to drop one after another, by what dropping it really costs.

Shape legend: D output width, F hidden width, n groups of head dimensions.

One-shot scores (leverage, norms) judge every unit as if all others stayed. Where several are collinear each of them looks
dispensable, and all of them go: on Qwen2.5-0.5B that drops 98 % of what an MLP sends (docs/papers.md). Elimination looks
again after every removal.

This module imports torch only: no modules, no hooks, no device policy.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Elimination", "eliminate_groups", "eliminate_units", "elimination"]

ROWS = 512  # that are moved at a time
STEPS = 96  # at most F / STEPS units leave between two updates of the whole matrix


class Elimination(NamedTuple):
    """Result of :func:`elimination`."""

    order: Tensor  # (F - R,) units in the order they went
    losses: Tensor  # (F - R,) what each removal added to the damped squared error, >= 0


def eliminate_units(W: Tensor, P: Tensor, *, rank: int) -> Tensor:
    """Units that stay, ``(rank,)`` ascending; see :func:`elimination`, which it calls."""
    alive = torch.ones(W.shape[1], dtype=torch.bool, device=W.device)
    alive[elimination(W, P, rank=rank).order] = False
    return alive.nonzero()[:, 0]


@torch.no_grad()
def elimination(W: Tensor, P: Tensor, *, rank: int) -> Elimination:
    r"""Remove hidden units one after another, each time the one whose loss after refitting the rest is least.

    With :math:`P = (C + \lambda I)^{-1}`, removing unit ``j`` and refitting ``W`` on the others raises
    :math:`\mathbb{E}\|W a - W' a\|^2` by :math:`\|w_j\|^2 / P_{jj}`, after which :math:`W \leftarrow W - w_j P_{j:} / P_{jj}`
    and :math:`P \leftarrow P - P_{:j} P_{j:} / P_{jj}`: optimal brain surgery (Hassibi and Stork 1993) in the metric of the
    activations. It sees the output weights, which the leverage scores of MoDeGPT Algorithm 1 do not.

    The large matrices are updated for up to ``F / 96`` units at once. Among these the removals are exact, one after the other,
    and the group ends as soon as its next unit costs more than the best one outside did: a collinear group cannot leave
    together because each of its units looked cheap.

    Args:
        W: ``(D, F)`` output weights; destroyed.
        P: ``(F, F)`` inverse of the damped second moment of the units, positive definite, same dtype; destroyed.
        rank: units to keep, ``1 <= rank <= F``.

    Returns:
        :class:`Elimination`: its running sum of losses is the whole curve of error over rank.

    Raises:
        ValueError: shapes disagree or ``rank`` is out of range.

    Cost: O((F + D) F (F - R)) time in F / 96 or more steps with one synchronisation each. The updates of ``P`` are those of a
    Cholesky factorisation, and as stable.
    """
    F = W.shape[1]
    if P.shape != (F, F):
        raise ValueError(f"P must be ({F}, {F}) for a weight {tuple(W.shape)}, got {tuple(P.shape)}")
    if not 1 <= rank <= F:
        raise ValueError(f"rank must be in [1, {F}], got {rank}")
    alive = torch.ones(F, dtype=torch.bool, device=W.device)
    units = torch.arange(F, device=W.device)  # what the columns of W are
    left, gone, order, losses = F - rank, 0, [], []
    while left:
        loss = torch.where(alive, W.square().sum(0) / P.diagonal(), torch.inf)
        lowest = loss.topk(min(1 + max(1, F // STEPS), len(units)), largest=False)
        group, limit = lowest.indices[:-1], lowest.values[-1]
        chosen, costs = _one_by_one(W[:, group], P[group[:, None], group], limit, left)
        J = group[chosen]
        columns = P[:, J]
        factor = torch.linalg.solve(columns[J], columns.T)  # P_JJ^-1 P_J:
        W.addmm_(W[:, J], factor, alpha=-1)
        P.addmm_(columns, factor, alpha=-1)
        alive[J] = False
        left -= len(J)
        order.append(units[J])
        losses += costs
        gone += len(J)
        if gone > len(units) // 8:  # the updates need not go on over what is gone
            stay, gone = alive.nonzero()[:, 0], 0
            W, P = _compact(W, stay, rows=False), _compact(P, stay, rows=True)
            units, alive = units[stay], alive[stay]
    none = torch.zeros(0, dtype=torch.long, device=W.device)
    return Elimination(torch.cat([none, *order]), torch.tensor(losses, dtype=torch.float64))


def _compact(A: Tensor, stay: Tensor, *, rows: bool) -> Tensor:
    """The columns ``stay`` (and the rows) moved to the front of ``A`` in place, some rows at a time; a view of them."""
    n = len(stay) if rows else len(A)
    for a in range(0, n, ROWS):
        b = min(a + ROWS, n)
        A[a:b, : len(stay)] = (A[stay[a:b]] if rows else A[a:b])[
            :, stay
        ]  # these rows are not below the ones they go to
    return A[:n, : len(stay)]


def _one_by_one(W: Tensor, P: Tensor, limit: Tensor, most: int) -> tuple[Tensor, list[float]]:
    """Exact elimination among a few units, one to ``most`` of them, as long as the next costs no more than ``limit``.

    Returns:
        Places of those that go, in order, and what each costs.
    """
    device, gram, P, limit = W.device, (W.T @ W).cpu(), P.cpu(), limit.item()
    chosen, costs = [], []
    while len(chosen) < min(most, len(P)):
        loss = gram.diagonal() / P.diagonal()
        loss[chosen] = torch.inf
        j = int(loss.argmin())
        if chosen and loss[j] > limit:
            break
        chosen.append(j)
        costs.append(loss[j].item())
        column = P[:, j].clone()
        ratio = column / column[j]
        gram = gram - torch.outer(ratio, gram[j])
        gram = gram - torch.outer(gram[:, j], ratio)
        P = P - torch.outer(ratio, column)
    return torch.tensor(chosen, device=device), costs


@torch.no_grad()
def eliminate_groups(M: Tensor, drop: int, sizes: Tensor | None = None) -> Tensor:
    r"""Choose groups of head dimensions to drop, by the exact error of dropping them together.

    Dropping the set ``D`` changes all scores by :math:`\sum_{a,b \in D} M_{ab}` in squared norm. Greedily, the group with the
    least :math:`(M_{aa} + 2 c_a)` per dimension goes, ``c`` the sum of the columns dropped so far; then dropped and kept
    groups of one size are exchanged one for one as long as that helps; where sizes differ, once for every way to make up
    ``drop`` of them. MoDeGPT Algorithm 2 drops the smallest norms, which
    bounds this error (Theorem 2) but does not see that groups act together; that choice, exchanged likewise, is the other
    start, so the result is never worse.

    Args:
        M: ``(..., n, n)`` symmetric cost of every pair of groups; any batch of heads.
        drop: dimensions to drop, at least 0 and less than all.
        sizes: ``(n,)`` dimensions in each group, 1 or 2; all 1 by default.

    Returns:
        ``(..., n)`` bool, true where a group stays.

    Raises:
        ValueError: ``drop`` is out of range, or groups of these sizes cannot make it up.

    Cost: O(n drop) a head and O(n^2) a round of exchanges, times the ways to make up ``drop``; heads together, one
    synchronisation a round.
    """
    sizes = torch.ones(M.shape[-1], dtype=torch.long, device="cpu") if sizes is None else sizes
    ones, twos = (int((sizes == size).sum()) for size in (1, 2))
    # Every way to make up `drop`: how many single dimensions, how many pairs.
    quotas = [
        (n, (drop - n) // 2) for n in range(drop + 1) if (drop - n) % 2 == 0 and n <= ones and (drop - n) // 2 <= twos
    ]
    if not quotas or not 0 <= drop < ones + 2 * twos:
        raise ValueError(f"groups of {ones} single dimensions and {twos} pairs cannot drop {drop} and keep some")
    single = (sizes == 1).to(M.device)
    own = M.diagonal(dim1=-2, dim2=-1)
    starts = torch.cat([_greedy(M, own, single, quotas, together=together) for together in (True, False)])
    ends = _exchanged(M, own, single, starts)
    best = (_columns(M, ends) * ends).sum(-1).argmin(0)  # (...)
    return ~ends.gather(0, best[None, ..., None].expand(1, *own.shape))[0]


def _greedy(M: Tensor, own: Tensor, single: Tensor, quotas: list[tuple[int, int]], *, together: bool) -> Tensor:
    """``(quotas, ..., n)`` dropped groups; not ``together`` each is judged by itself."""
    left = torch.tensor(quotas, device=M.device).view(len(quotas), *[1] * (own.dim() - 1), 2)  # single ones, pairs
    dropped = torch.zeros(len(quotas), *own.shape, dtype=torch.bool, device=M.device)
    cross = torch.zeros_like(dropped, dtype=M.dtype)
    for _ in range(max(map(sum, quotas))):  # a group a step; where the quota is met nothing goes
        full = torch.where(single, left[..., :1] == 0, left[..., 1:] == 0)
        cost = (own + 2 * cross if together else own.expand_as(cross)).masked_fill(dropped | full, torch.inf)
        cost = torch.where(single, cost, cost / 2)
        least, index = cost.min(-1, keepdim=True)
        chosen = torch.zeros_like(dropped).scatter(-1, index, least < torch.inf)
        dropped = dropped | chosen
        left = left - torch.stack([(chosen & single).sum(-1), (chosen & ~single).sum(-1)], -1)
        cross = cross + _columns(M, chosen)
    return dropped


def _exchanged(M: Tensor, own: Tensor, single: Tensor, dropped: Tensor) -> Tensor:
    """``dropped`` ``(starts, ..., n)`` after exchanges; every round takes the best one of every head that has one."""
    n = M.shape[-1]
    unlike = single[:, None] != single
    while True:
        cross = _columns(M, dropped)
        change = (own - 2 * cross)[..., :, None] + (own + 2 * cross)[..., None, :] - 2 * M  # [leaves D, enters D]
        change = change.masked_fill(unlike | ~dropped[..., :, None] | dropped[..., None, :], torch.inf)
        least, where = change.flatten(-2).min(-1, keepdim=True)
        helps = least < -1e-9 * own.sum(-1, keepdim=True)  # well above rounding, so that this ends
        if not helps.any():
            return dropped
        exchanged = dropped.scatter(-1, where // n, False).scatter(-1, where % n, True)
        dropped = torch.where(helps, exchanged, dropped)


def _columns(M: Tensor, chosen: Tensor) -> Tensor:
    """Sum of the ``chosen`` ``(..., n)`` columns of every matrix."""
    return (M @ chosen.to(M)[..., None])[..., 0]
