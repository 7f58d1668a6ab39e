"""Two bases for the products of many pairs of heads: a Tucker-2 decomposition that never forms the products.

Shape legend: H heads on the left, K on the right (K divides H; head i goes with head i // (H/K)), h head dim, d_l, d_r
widths, r_l, r_r widths of the bases, D relative offsets.

``G_i = L_i^T R_g`` (d_l, d_r) has rank at most h, so every step needs only the ``h x h`` moments ``S_i = L_i A^T A
L_i^T``, which may be summed over the heads of a group and rotated for RoPE. LatentLLM (arXiv:2505.18413), App. E.
"""

from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from rankfold.linalg.lowrank import fix_signs
from rankfold.linalg.psd import all_finite

SETTLED = 1e-6  # an alternation that lowers the error by a smaller part of it is the last one


class PairTucker(NamedTuple):
    """Result of :func:`pair_tucker`."""

    left: Tensor  # (r_l, d_l), orthonormal rows
    right: Tensor  # (r_r, d_r), orthonormal rows
    loss_history: list[float]


Means = tuple[Tensor | None, Tensor | None]  # (H, h) and (K, h)


def pair_tucker(
    L: Tensor,
    R: Tensor,
    *,
    ranks: tuple[int, int],
    means: Means = (None, None),
    rotations: Tensor | None = None,
    alternations: int = 8,
) -> PairTucker:
    r"""Best orthonormal row bases for ``G_i = L_i^T Theta R_g`` over all heads ``i`` and rotations.

    Minimises :math:`\sum \|G_i - A_l^\top A_l G_i A_r^\top A_r\|^2`, LatentLLM Eq. 68: alternately the top
    eigenvectors of Eq. 75 and 77, starting from those of :math:`\sum G_i G_i^\top`. ``means`` (H, h), (K, h) are one
    more input direction per side that is always kept.

    Args:
        L, R: ``(H, h, d_l)`` and ``(K, h, d_r)``; one dtype, fp32 or fp64.
        ranks, means, rotations, alternations: as in :func:`rankfold.linalg.joint_qk.joint_qk`.

    Raises:
        ValueError: ranks or alternations out of range, rotations of another size than the heads.
    """
    for name, r, M in (("left", ranks[0], L), ("right", ranks[1], R)):
        full = min(M.shape[2], M.shape[0] * M.shape[1])
        if not 1 <= r <= full:
            raise ValueError(f"{name} rank must be in [1, {full}] for {tuple(M.shape)} heads, got {r}")
    if alternations < 1:
        raise ValueError(f"alternations must be >= 1, got {alternations}")
    if rotations is not None and rotations.shape[1:] != (L.shape[1],) * 2:
        raise ValueError(f"rotations must be (D, {L.shape[1]}, {L.shape[1]}), got {tuple(rotations.shape)}")
    whole = across(moments(R, means[1]), rotations, L, left=True)
    A_l, history = _top(L, whole, ranks[0]), []
    for _ in range(alternations):
        A_r = _top(R, across(moments(L @ A_l.T, means[0]), rotations, R, left=False), ranks[1])
        A_l = _top(L, across(moments(R @ A_r.T, means[1]), rotations, L, left=True), ranks[0])
        history.append(_residual(L, R, A_l, A_r, means, rotations, whole))
        if len(history) > 1 and history[-2] - history[-1] <= SETTLED * history[-1]:
            break
    return PairTucker(A_l, A_r, history)


def check_heads(many: Tensor, few: Tensor, shared: str) -> None:
    """Raise unless the heads ``many`` (H, ..) can share ``few`` (K, ..) evenly and all are finite."""
    if len(many) % len(few):
        raise ValueError(f"{len(many)} query heads cannot share {len(few)} {shared} heads evenly")
    if not (all_finite(many) and all_finite(few)):
        raise ValueError(f"the query or {shared} heads have non-finite entries; check the checkpoint")


def _residual(
    L: Tensor, R: Tensor, A_l: Tensor, A_r: Tensor, means: Means, rotations: Tensor | None, whole: Tensor
) -> float:
    """Relative error as ``||(1-P) G||^2 + ||P G (1-P')||^2``: two positive terms, so nothing cancels near full rank."""
    kept_l, kept_r = L @ A_l.T, R @ A_r.T
    lost_l, lost_r = L - kept_l @ A_l, R - kept_r @ A_r
    total = (moments(L, means[0]) * whole).sum()
    error = (moments(lost_l) * whole).sum()
    error = error + (moments(kept_l, means[0]) * across(moments(lost_r), rotations, L, left=True)).sum()
    return (error / total.clamp_min(torch.finfo(L.dtype).tiny)).clamp_min(0).sqrt().item()


def moments(M: Tensor, mean: Tensor | None = None) -> Tensor:
    """``M_i M_i^T`` (+ mean mean^T), one (h, h) per head."""
    S = M @ M.mT
    return S if mean is None else S + mean[:, :, None] * mean[:, None, :]


def across(S: Tensor, rotations: Tensor | None, to: Tensor, *, left: bool) -> Tensor:
    """Carry (h, h) moments to the other side: rotate, then sum over (to keys) or repeat for (to queries) each group."""
    heads = to.shape[0]
    if heads < S.shape[0]:
        S = S.unflatten(0, (heads, -1)).sum(1)
    if rotations is not None:
        theta = rotations.to(S) if left else rotations.to(S).mT
        S = reduce(add, (turn @ S @ turn.T for turn in theta))
    return S.repeat_interleave(heads // S.shape[0], 0)


def weighted_rows(M: Tensor, S: Tensor) -> Tensor:
    """Stack of ``S_i^(1/2) M_i`` (heads h, d), a root of the matrix in Eq. 75."""
    values, V = torch.linalg.eigh(S)
    return ((V * values.clamp_min(0).sqrt()[:, None]).mT @ M).flatten(0, 1)


def _top(M: Tensor, S: Tensor, rank: int) -> Tensor:
    """Leading right singular vectors of :func:`weighted_rows` as orthonormal rows, largest entry of each positive."""
    rows = weighted_rows(M, S)
    if rows.shape[0] >= rows.shape[1]:
        vectors = torch.linalg.eigh(rows.T @ rows).eigenvectors.flip(1)[:, :rank]
    else:  # from the left ones, which are fewer; QR makes up for what division by small singular values would lose
        left = torch.linalg.eigh(rows @ rows.T).eigenvectors.flip(1)[:, :rank]
        vectors = torch.linalg.qr(rows.T @ left).Q
    return fix_signs(vectors).T
