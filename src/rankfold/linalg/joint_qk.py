"""Queries and keys compressed together: one shared latent each, cores per head.

Shape legend: d model width, h head dim, H query heads, K key heads (K divides H; query head i uses key head i //
(H/K)), r_q, r_k latent widths, D relative offsets.

The attention logits are ``x^T G_i x`` with ``G_i = W_q,i^T W_k,i`` (d, d) of rank at most h. LatentLLM
(arXiv:2505.18413), Sec. 4.1 and App. E, F, compresses the stack of all ``P G_i P`` as a 3-mode tensor whose head mode
stays whole (Tucker-2, called HOSVD there). No ``d x d`` matrix per head is formed: with thin factors ``L_i = W_q,i
P`` and ``R_g = W_k,g P`` (h, d), every step needs only the ``h x h`` moments ``S_i = L_i A^T A L_i^T``, which may be
summed over the query heads of a group and rotated for RoPE.

Positions. RoPE: pass ``rotations`` (App. F.3). Additive encodings change nothing but the statistics, which must be
measured after the addition (F.1). Concatenated ones add a constant to the logits and change nothing (F.2). Only a
rotation may sit between projection and logits: with q/k-norm (Qwen3, Gemma3) this loss is not the model's.

This module imports torch and rankfold.linalg only: no modules, no hooks, no device policy.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rankfold.linalg.lowrank import fix_signs
from rankfold.linalg.preconditioner import Preconditioner
from rankfold.linalg.psd import all_finite

__all__ = [
    "Affine",
    "JointQK",
    "Pair",
    "check_heads",
    "choose_ranks",
    "joint_qk",
    "pair_error",
    "pair_tucker",
    "qk_parameters",
    "rope_rotations",
]

SETTLED = 1e-6  # an alternation that lowers the error by a smaller part of it is the last one


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


class PairTucker(NamedTuple):
    """Result of :func:`pair_tucker`."""

    left: Tensor  # (r_l, d_l), orthonormal rows
    right: Tensor  # (r_r, d_r), orthonormal rows
    loss_history: list[float]


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
    LatentLLM Algorithm 1, Eq. 13, GQA by Eq. 148-150 (the paper swaps the index ranges of group and member there).
    Algorithm 1 prints ``G A_k A_k^T G^T``, which does not multiply; Eq. 75's ``A_k^T A_k`` is meant. ``J_q`` is (r_q,
    r_q), not (r_k, r_k).

    With ``affine``, inputs become ``[x; 1]`` and the direction of the mean is kept for free (Eq. 96-144): in the
    coordinates ``[Sigma^(1/2), mean; 0, 1]`` the heads are ``[W P, W mean + b]``, and the biases come out as ``W mean
    + b - B A mean`` (Eq. 121-122), so the mean query and key stay exact. (Eq. 137-142 swap r_q and r_k.) With
    ``rotations``, the sum also runs over offsets (Eq. 181).

    Args:
        W_q: ``(H, h, d)`` query heads.
        W_k: ``(K, h, d)`` key heads.
        precond: of the layer input (rootcov is optimal); made from the covariance, not the second moment, if
            ``affine`` is given.
        ranks: ``(r_q, r_k)``, each at most ``min(d, heads * h)`` of its side. Below ``h`` heads become redundant
            (App. E).
        affine: mean and biases.
        rotations: ``(D, h, h)`` from :func:`rope_rotations`.
        alternations: at most, ``>= 1``; the paper uses 8. They end once the error has settled to 1e-6 of itself, on trained
            models after two or three.

    Returns:
        :class:`JointQK`.

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
    if affine is not None:
        mean = affine.mean.to(L)
        b_q = (l_mean * precond.scale - B_q @ (A_q @ mean)).to(W_q.dtype)
        b_k = (r_mean * precond.scale - B_k @ (A_k @ mean)).to(W_k.dtype)
    weights = (factor.to(W_q.dtype) for factor in (A_q, A_k, B_q, B_k))
    return JointQK(*weights, b_q, b_k, tucker.loss_history, tucker.loss_history[-1])


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
        budget: most numbers for ``A`` and ``B`` with block identities, biases not counted: :func:`qk_parameters`.
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
        (L, _across(_moments(R, means[1]), rotations, L, left=True)),
        (R, _across(_moments(L, means[0]), rotations, R, left=False)),
    ):
        values = torch.linalg.svdvals(_rows(this, S)).square()
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


@torch.no_grad()
def rope_rotations(inv_freq: Tensor, head_dim: int, *, window: int = 5, causal: bool = True) -> Tensor:
    r"""Relative rotations ``Theta_delta`` with ``q_m^T k_n = q^T Theta_(n-m) k``, Hugging Face's half layout.

    LatentLLM Eq. 174: pairs are ``(i, i + n)`` with ``n = len(inv_freq)``; dims from ``2 n`` on do not rotate
    (partial rotary). Summing over all offsets is impractical, so a window is used; offsets weigh equally.

    Args:
        inv_freq: ``(n,)`` angles per position, ``1 <= n <= head_dim // 2``.
        head_dim: ``h``.
        window: largest distance, ``>= 0``; the paper suggests 5.
        causal: only keys at or before the query, ``n - m`` in ``[-window, 0]``; else both directions.

    Returns:
        ``(D, h, h)``, dtype of ``inv_freq``; orthogonal.

    Raises:
        ValueError: sizes out of range.
    """
    n = inv_freq.shape[0]
    if inv_freq.ndim != 1 or not 1 <= n <= head_dim // 2:
        raise ValueError(f"inv_freq must be (n,) with 1 <= n <= {head_dim // 2}, got {tuple(inv_freq.shape)}")
    if window < 0:
        raise ValueError(f"window must be >= 0, got {window}")
    offsets = torch.arange(-window, 1 if causal else window + 1, dtype=inv_freq.dtype, device=inv_freq.device)
    angle = offsets[:, None] * inv_freq  # (D, n)
    theta = torch.eye(head_dim, dtype=inv_freq.dtype, device=inv_freq.device).repeat(len(offsets), 1, 1)
    i = torch.arange(n, device=inv_freq.device)
    theta[:, i, i] = theta[:, i + n, i + n] = angle.cos()
    theta[:, i, i + n], theta[:, i + n, i] = -angle.sin(), angle.sin()
    return theta


def qk_parameters(
    d: int,
    h: int,
    heads: tuple[int, int],
    ranks: tuple[int, int],
    *,
    block_identity: bool = True,
    head_junction: bool = False,
) -> int:
    """Numbers a joint pair stores, biases and permutations not counted.

    ``r_q (d + H h) + r_k (d + K h)``, minus ``r_q^2 + r_k^2`` with ``block_identity`` in both ``A``, minus ``K h^2``
    with ``head_junction``. LatentLLM Sec. 4.1 has ``H = K``; a group shares its keys and so has ONE per-head
    junction. The same count holds for value-output with ``heads=(H, K)``, ``ranks=(r_o, r_v)`` where ``d_out = d``.
    """
    (H, K), (r_q, r_k) = heads, ranks
    if head_junction and r_k < h:
        raise ValueError(f"a per-head junction needs r_k >= {h} (the head dim), got {r_k}")
    saved = (r_q**2 + r_k**2) * block_identity + K * h * h * head_junction
    return r_q * (d + H * h) + r_k * (d + K * h) - saved


def pair_tucker(
    L: Tensor,
    R: Tensor,
    *,
    ranks: tuple[int, int],
    means: tuple[Tensor | None, Tensor | None] = (None, None),
    rotations: Tensor | None = None,
    alternations: int = 8,
) -> PairTucker:
    r"""Best orthonormal row bases for ``G_i = L_i^T Theta R_g`` over all heads ``i`` and rotations.

    Minimises :math:`\sum \|G_i - A_l^\top A_l G_i A_r^\top A_r\|^2`, LatentLLM Eq. 68: alternately the top
    eigenvectors of Eq. 75 and 77, starting from those of :math:`\sum G_i G_i^\top`. ``means`` (H, h), (K, h) are one
    more input direction per side that is always kept.

    Args:
        L, R: ``(H, h, d_l)`` and ``(K, h, d_r)``; one dtype, fp32 or fp64.
        ranks, means, rotations, alternations: as in :func:`joint_qk`.

    Returns:
        :class:`PairTucker`.
    """
    for name, r, M in (("left", ranks[0], L), ("right", ranks[1], R)):
        full = min(M.shape[2], M.shape[0] * M.shape[1])
        if not 1 <= r <= full:
            raise ValueError(f"{name} rank must be in [1, {full}] for {tuple(M.shape)} heads, got {r}")
    if alternations < 1:
        raise ValueError(f"alternations must be >= 1, got {alternations}")
    if rotations is not None and rotations.shape[1:] != (L.shape[1],) * 2:
        raise ValueError(f"rotations must be (D, {L.shape[1]}, {L.shape[1]}), got {tuple(rotations.shape)}")
    whole = _across(_moments(R, means[1]), rotations, L, left=True)
    A_l, history = _top(L, whole, ranks[0]), []
    for _ in range(alternations):
        A_r = _top(R, _across(_moments(L @ A_l.T, means[0]), rotations, R, left=False), ranks[1])
        A_l = _top(L, _across(_moments(R @ A_r.T, means[1]), rotations, L, left=True), ranks[0])
        history.append(_residual(L, R, A_l, A_r, means, rotations, whole))
        if len(history) > 1 and history[-2] - history[-1] <= SETTLED * history[-1]:
            break
    return PairTucker(A_l, A_r, history)


class Pair(NamedTuple):
    """Heads on two sides, and what they make of the mean input where the metric is a covariance (biases included)."""

    left: Tensor  # (H, h, d_l)
    right: Tensor  # (K, h, d_r)
    left_mean: Tensor | None = None  # (H, h)
    right_mean: Tensor | None = None  # (K, h)


@torch.no_grad()
def pair_error(
    dense: Pair, other: Pair, *, metrics: tuple[Tensor | None, Tensor], rotations: Tensor | None = None
) -> float:
    r"""Relative error of all products :math:`G_i = L_i^\top \Theta R_g`, in the metric of inputs on either side.

    :math:`\sum \operatorname{tr}(C_l D C_r D^\top)` for ``D`` the change of ``G_i``, over the same for ``G_i``, root. From
    ``h x h`` moments: with ``D = (L - L')^T R + L'^T (R - R')`` every small term is a product of small factors.

    Args:
        dense, other: what is measured against what.
        metrics: ``C_l (d_l, d_l)``, or None for the identity, and ``C_r (d_r, d_r)``: for scores twice the second moment of the
            tokens (twice the covariance where means are given), for value-output None and that of the tokens.
        rotations: as in :func:`joint_qk`.

    Cost: products of O((H + K) h d^2).
    """
    first, last = _Mixed(dense.left, other.left, metrics[0]), _Mixed(dense.right, other.right, metrics[1])
    first.add(dense.left_mean, other.left_mean)
    last.add(dense.right_mean, other.right_mean)

    def product(S_l: Tensor, S_r: Tensor) -> Tensor:
        return (S_l * _across(S_r, rotations, dense.left, left=True)).sum()

    error = product(first.gap, last.dense) + product(first.kept, last.gap) + 2 * product(first.both, last.crossed)
    total = product(first.dense, last.dense)
    return (error / total.clamp_min(torch.finfo(total.dtype).tiny)).clamp_min(0).sqrt().item()


class _Mixed:
    """Moments (heads, h, h) of dense heads ``M``, of other ones ``N``, and of the gap ``M - N``."""

    def __init__(self, M: Tensor, N: Tensor, C: Tensor | None):
        gap = M - N
        weighted = gap if C is None else gap @ C
        self.gap, self.both = weighted @ gap.mT, weighted @ N.mT  # gap C gap^T, gap C N^T
        self.kept = (N if C is None else N @ C) @ N.mT
        self.crossed = self.gap + self.both.mT  # M C gap^T
        self.dense = self.crossed + self.both + self.kept

    def add(self, M: Tensor | None, N: Tensor | None) -> None:
        """The means, one more input direction of weight 1."""
        if M is not None:
            mean = _Mixed(M[..., None], N[..., None], None)
            for name in ("gap", "kept", "both", "crossed", "dense"):
                setattr(self, name, getattr(self, name) + getattr(mean, name))


def _residual(L: Tensor, R: Tensor, A_l: Tensor, A_r: Tensor, means, rotations, whole: Tensor) -> float:
    """Relative error as ``||(1-P) G||^2 + ||P G (1-P')||^2``: two positive terms, so nothing cancels near full rank."""
    kept_l, kept_r = L @ A_l.T, R @ A_r.T
    lost_l, lost_r = L - kept_l @ A_l, R - kept_r @ A_r
    total = (_moments(L, means[0]) * whole).sum()
    error = (_moments(lost_l) * whole).sum()
    error = error + (_moments(kept_l, means[0]) * _across(_moments(lost_r), rotations, L, left=True)).sum()
    return (error / total.clamp_min(torch.finfo(L.dtype).tiny)).clamp_min(0).sqrt().item()


def _moments(M: Tensor, mean: Tensor | None = None) -> Tensor:
    """``M_i M_i^T`` (+ mean mean^T), one (h, h) per head."""
    S = M @ M.mT
    return S if mean is None else S + mean[:, :, None] * mean[:, None, :]


def _across(S: Tensor, rotations: Tensor | None, to: Tensor, *, left: bool) -> Tensor:
    """Carry (h, h) moments to the other side: rotate, then sum over (to keys) or repeat for (to queries) each group."""
    heads = to.shape[0]
    if heads < S.shape[0]:
        S = S.unflatten(0, (heads, -1)).sum(1)
    if rotations is not None:
        theta = rotations.to(S) if left else rotations.to(S).mT
        S = sum(turn @ S @ turn.T for turn in theta)
    return S.repeat_interleave(heads // S.shape[0], 0)


def _rows(M: Tensor, S: Tensor) -> Tensor:
    """Stack of ``S_i^(1/2) M_i`` (heads h, d), a root of the matrix in Eq. 75."""
    values, V = torch.linalg.eigh(S)
    return ((V * values.clamp_min(0).sqrt()[:, None]).mT @ M).flatten(0, 1)


def _top(M: Tensor, S: Tensor, rank: int) -> Tensor:
    """Leading right singular vectors of :func:`_rows` as orthonormal rows, largest entry of each positive."""
    rows = _rows(M, S)
    if rows.shape[0] >= rows.shape[1]:
        vectors = torch.linalg.eigh(rows.T @ rows).eigenvectors.flip(1)[:, :rank]
    else:  # from the left ones, which are fewer; QR makes up for what division by small singular values would lose
        left = torch.linalg.eigh(rows @ rows.T).eigenvectors.flip(1)[:, :rank]
        vectors = torch.linalg.qr(rows.T @ left).Q
    return fix_signs(vectors).T


def _whiten(W_q: Tensor, W_k: Tensor, precond: Preconditioner, affine: Affine | None):
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


def _multiples(full: int, multiple: int, device) -> Tensor:
    steps = torch.arange(multiple, full + 1, multiple, device=device)
    return steps if len(steps) and steps[-1] == full else torch.cat([steps, torch.tensor([full], device=device)])


def _check(W_q: Tensor, W_k: Tensor, precond: Preconditioner) -> None:
    d = precond.width
    if W_q.ndim != 3 or W_k.ndim != 3 or W_q.shape[1:] != W_k.shape[1:] or W_q.shape[2] != d:
        raise ValueError(f"W_q (H, h, {d}) and W_k (K, h, {d}) expected, got {tuple(W_q.shape)} and {tuple(W_k.shape)}")
    check_heads(W_q, W_k, "key")


def check_heads(many: Tensor, few: Tensor, shared: str) -> None:
    """Raise unless the heads ``many`` (H, ..) can share ``few`` (K, ..) evenly and all are finite."""
    if len(many) % len(few):
        raise ValueError(f"{len(many)} query heads cannot share {len(few)} {shared} heads evenly")
    if not (all_finite(many) and all_finite(few)):
        raise ValueError(f"the query or {shared} heads have non-finite entries; check the checkpoint")
