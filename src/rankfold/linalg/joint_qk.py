"""Queries and keys compressed together: one shared latent each, cores per head.

Shape legend: d model width, h head dim, H query heads, K key heads (K divides H; query head i uses key head i //
(H/K)), r_q, r_k latent widths, D relative offsets.

The attention logits are ``x^T G_i x`` with ``G_i = W_q,i^T W_k,i`` (d, d) of rank at most h. LatentLLM
(arXiv:2505.18413), Sec. 4.1 and App. E, F, compresses the stack of all ``P G_i P`` as a 3-mode tensor whose head mode
stays whole (Tucker-2, called HOSVD there): :mod:`rankfold.linalg.pair_tucker` of the thin factors ``L_i = W_q,i P`` and
``R_g = W_k,g P`` (h, d).

Positions. RoPE: pass ``rotations`` (App. F.3). Additive encodings change nothing but the statistics, which must be
measured after the addition (F.1). Concatenated ones add a constant to the logits and change nothing (F.2). Only a
rotation may sit between projection and logits: with q/k-norm (Qwen3, Gemma3) this loss is not the model's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rankfold.linalg.pair_tucker import across, check_heads, moments, pair_tucker, weighted_rows
from rankfold.linalg.preconditioner import Preconditioner


class Affine(NamedTuple):
    """What a layer with biases needs besides its weights (App. E.2)."""

    mean: Tensor  # (d,) mean input
    b_q: Tensor  # (H, h)
    b_k: Tensor  # (K, h)


class JointQK(NamedTuple):
    """Result of :func:`joint_qk`: ``q_i = B_q[i] A_q x + b_q[i]``, ``k_g = B_k[g] A_k x + b_k[g]``; weight dtype."""

    A_q: Tensor  # (r_q, d)
    A_k: Tensor  # (r_k, d)
    B_q: Tensor  # (H, h, r_q)
    B_k: Tensor  # (K, h, r_k)
    b_q: Tensor | None  # (H, h), only with ``affine``
    b_k: Tensor | None  # (K, h), only with ``affine``
    loss_history: list[float]  # relative error after each alternation made, non-increasing
    relative_error: float  # RMS logit error over RMS logit, before softmax, tokens independent, metric of precond


@torch.no_grad()
def joint_qk(
    W_q: Tensor,
    W_k: Tensor,
    precond: Preconditioner,
    *,
    ranks: tuple[int, int],
    affine: Affine | None = None,
    rotations: Tensor | None = None,
    alternations: int = 8,
) -> JointQK:
    r"""Latent queries and keys with the smallest attention-logit error.

    Minimises :math:`\sum_i \|P (W_{q,i}^\top W_{k,g} - A_q^\top B_{q,i}^\top B_{k,g} A_k) P\|^2` by alternating SVDs:
    LatentLLM Algorithm 1, Eq. 13, GQA by Eq. 148-150 (above Eq. 147 the index ranges of group and member are swapped).
    Algorithm 1 prints ``G A_k A_k^T G^T``, which does not multiply; Eq. 75's ``A_k^T A_k`` is meant. ``J_q`` is (r_q,
    r_q), not (r_k, r_k).

    With ``affine``, inputs become ``[x; 1]`` and the direction of the mean is kept for free (Eq. 96-144): in the
    coordinates ``[Sigma^(1/2), mean; 0, 1]`` the heads are ``[W P, W mean + b]``, and the biases come out as ``W mean
    + b - B A mean`` (Eq. 121-122), so the mean query and key stay exact. (Eq. 140 and 142 swap r_q and r_k.) With
    ``rotations``, the sum also runs over offsets (Eq. 181).

    Args:
        W_q: ``(H, h, d)`` query heads.
        W_k: ``(K, h, d)`` key heads.
        precond: of the layer input (rootcov is optimal); made from the covariance, not the second moment, if
            ``affine`` is given.
        ranks: ``(r_q, r_k)``, each at most ``min(d, heads * h)`` of its side. Below ``h`` heads become redundant
            (App. E).
        affine: mean and biases.
        rotations: ``(D, h, h)`` from :func:`rankfold.linalg.rotations.rope_rotations`.
        alternations: at most, ``>= 1``; the paper uses 8 (Sec. 5). They end once the error has settled to 1e-6 of
            itself, on trained models after two or three.

    Raises:
        ValueError: shapes disagree, ranks or alternations out of range, non-finite weights.

    Cost per alternation: products of O(H h d^2) and two ``eigh`` of sizes ``min(d, H h)`` and ``min(d, K h)``; memory
    O((H + K) h d).
    """
    _check(W_q, W_k, precond)
    L, R, l_mean, r_mean = _whiten(W_q, W_k, precond, affine)
    tucker = pair_tucker(L, R, ranks=ranks, means=(l_mean, r_mean), rotations=rotations, alternations=alternations)
    B_q, B_k = L @ tucker.left.T, R @ tucker.right.T
    A_q, A_k = precond.undo(tucker.left), precond.undo(tucker.right)
    b_q = b_k = None
    if affine is not None and l_mean is not None and r_mean is not None:
        mean = affine.mean.to(L)
        b_q = (l_mean * precond.scale - B_q @ (A_q @ mean)).to(W_q.dtype)
        b_k = (r_mean * precond.scale - B_k @ (A_k @ mean)).to(W_k.dtype)
    A_q, A_k, B_q, B_k = (factor.to(W_q.dtype) for factor in (A_q, A_k, B_q, B_k))
    return JointQK(A_q, A_k, B_q, B_k, b_q, b_k, tucker.loss_history, tucker.loss_history[-1])


@torch.no_grad()
def choose_ranks(
    W_q: Tensor,
    W_k: Tensor,
    precond: Preconditioner,
    *,
    budget: int,
    affine: Affine | None = None,
    rotations: Tensor | None = None,
    multiple: int = 1,
) -> tuple[int, int]:
    r"""Split one parameter budget between ``r_q`` and ``r_k`` by the spectra.

    The error of the truncated HOSVD is at most the sum of the two discarded eigenvalue tails of ``sum G_i G_i^T`` and
    ``sum G_i^T G_i``; this minimises that bound exactly over all pairs that fit. LatentLLM App. E (second note) asks
    for it and gives no rule.

    Args:
        budget: most numbers for ``A`` and ``B`` with block identities, ``r_q (d + H h - r_q) + r_k (d + K h - r_k)``.
        multiple: ranks are multiples of this, except where a side is at its full rank.
        W_q, W_k, precond, affine, rotations: as in :func:`joint_qk`.

    Returns:
        ``(r_q, r_k)``.

    Raises:
        ValueError: shapes disagree, or not even the smallest ranks fit.

    Cost: singular values of ``(H h, d)`` and ``(K h, d)``.
    """
    _check(W_q, W_k, precond)
    L, R, *means = _whiten(W_q, W_k, precond, affine)
    tails = []
    for this, S in (
        (L, across(moments(R, means[1]), rotations, L, left=True)),
        (R, across(moments(L, means[0]), rotations, R, left=False)),
    ):
        values = torch.linalg.svdvals(weighted_rows(this, S)).square()
        tails.append(torch.cat([values.flip(0).cumsum(0).flip(0), values.new_zeros(1)]))  # tails[r] = loss at rank r
    d, width = L.shape[2], (L.shape[0] * L.shape[1], R.shape[0] * R.shape[1])
    options = [_multiples(len(tail) - 1, multiple, tail.device) for tail in tails]
    price = [r * (d + w) - r * r for r, w in zip(options, width, strict=True)]  # rising, as r <= min(d, w)
    best = torch.searchsorted(price[1], budget - price[0], right=True) - 1  # largest affordable r_k per r_q
    if (best < 0).all():
        least = int(price[0][0] + price[1][0])
        raise ValueError(
            f"budget {budget} cannot hold the smallest ranks, which need {least} numbers; raise the budget"
        )
    loss = tails[0][options[0]] + tails[1][options[1][best.clamp_min(0)]]
    pick = torch.where(best < 0, torch.inf, loss).argmin()
    return int(options[0][pick]), int(options[1][best[pick]])


def _whiten(
    W_q: Tensor, W_k: Tensor, precond: Preconditioner, affine: Affine | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    L, R = precond.apply(W_q), precond.apply(W_k)
    if affine is None:
        return L, R, None, None
    mean = affine.mean.to(L)
    if mean.shape != L.shape[2:] or affine.b_q.shape != L.shape[:2] or affine.b_k.shape != R.shape[:2]:
        raise ValueError(
            f"affine must have mean {tuple(L.shape[2:])}, b_q {tuple(L.shape[:2])}, b_k {tuple(R.shape[:2])}, "
            f"got {tuple(mean.shape)}, {tuple(affine.b_q.shape)}, {tuple(affine.b_k.shape)}"
        )
    l_mean = (W_q.to(L) @ mean + affine.b_q.to(L)) / precond.scale
    r_mean = (W_k.to(L) @ mean + affine.b_k.to(L)) / precond.scale
    return L, R, l_mean, r_mean


def _multiples(full: int, multiple: int, device: torch.device) -> Tensor:
    steps = torch.arange(multiple, full + 1, multiple, device=device)
    return steps if len(steps) and steps[-1] == full else torch.cat([steps, torch.tensor([full], device=device)])


def _check(W_q: Tensor, W_k: Tensor, precond: Preconditioner) -> None:
    d = precond.width
    if W_q.ndim != 3 or W_k.ndim != 3 or W_q.shape[1:] != W_k.shape[1:] or W_q.shape[2] != d:
        raise ValueError(f"W_q (H, h, {d}) and W_k (K, h, {d}) expected, got {tuple(W_q.shape)} and {tuple(W_k.shape)}")
    check_heads(W_q, W_k, "key")
