"""Values and output projection compressed together: one shared latent each, cores per head.

Shape legend: d model width, d_out output width, h head dim, H query heads, K value heads (K divides H; query head i
uses value head i // (H/K)), r_o, r_v latent widths.

A head adds ``G_i x`` with ``G_i = W_o,i W_v,g`` (d_out, d) of rank at most h, weighted by the attention. LatentLLM
(arXiv:2505.18413), Sec. 4.2 and App. G, compresses the stack of ``G_i P`` like queries and keys. The paper found it
no better than compressing V and O apart, because the loss leaves out the attention map (Remark 11); it treats heads as
independent, too. For the split form use :func:`rankfold.linalg.lowrank.low_rank` twice.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rankfold.linalg.lowrank import fix_signs, metric_error
from rankfold.linalg.pair_tucker import check_heads, pair_tucker
from rankfold.linalg.preconditioner import Preconditioner
from rankfold.linalg.psd import check_moment, psd_root


class JointVO(NamedTuple):
    """Result of :func:`joint_vo`: ``v_g = B_v[g] A_v x``, ``y = B_o sum_i A_o[i] (attention_i v_g)``; weight dtype."""

    B_o: Tensor  # (d_out, r_o), orthonormal columns
    A_o: Tensor  # (H, r_o, h)
    B_v: Tensor  # (K, h, r_v)
    A_v: Tensor  # (r_v, d)
    loss_history: list[float]  # relative error after each alternation, non-increasing
    relative_error: float  # RMS error of single heads over their RMS output, in the metric of precond


class AttentionAwareOutput(NamedTuple):
    """Result of :func:`attention_aware_output`."""

    B_o: Tensor  # (d_out, r_o), orthonormal columns
    A_o: Tensor  # (H, r_o, h)
    E: Tensor  # (H h, H h), block-diagonal: compressed values as predicted from dense ones
    relative_error: float  # RMS error of the whole output over its RMS, on the statistics ``C_o``


@torch.no_grad()
def joint_vo(
    W_o: Tensor,
    W_v: Tensor,
    precond: Preconditioner,
    *,
    ranks: tuple[int, int],
    means: Tensor | None = None,
    alternations: int = 8,
) -> JointVO:
    r"""Latent values and outputs with the smallest error per head.

    Minimises :math:`\sum_i \|(W_{o,i} W_{v,g} - B_o A_{o,i} B_{v,g} A_v) P\|^2`: LatentLLM Eq. 184-188 by the
    alternation of Algorithm 1. (Eq. 197 prints r_o as the rank of ``A_v``.) For heads in groups the sum runs over
    query heads.

    Args:
        W_o: ``(H, d_out, h)``; from ``o_proj.weight`` by ``.unflatten(1, (H, h)).transpose(0, 1)``.
        W_v: ``(K, h, d)``.
        precond: of the layer input; made from the covariance if :func:`vo_bias` or ``means`` is used (App. G.1).
        ranks: ``(r_o, r_v)``, at most ``min(d_out, H h)`` and ``min(d, K h)``.
        means: ``(K, h)`` mean values ``W_v mean + b_v``, where a bias of values keeps them, ``b_v + (W_v - B_v A_v)
            mean``: what the output projection loses of them is then part of the loss (Eq. 96-144, on one side).
        alternations: at most, ``>= 1``; see :func:`rankfold.linalg.joint_qk.joint_qk`.

    Raises:
        ValueError: shapes disagree, ranks or alternations out of range, non-finite weights.

    Cost per alternation: as :func:`rankfold.linalg.joint_qk.joint_qk`, for ``(H h, d_out)`` and ``(K h, d)``.
    """
    _check(W_o, W_v, precond)
    L, R = W_o.to(precond.dtype).mT, precond.apply(W_v)  # (H, h, d_out), (K, h, d)
    means = None if means is None else means.to(R) / precond.scale
    tucker = pair_tucker(L, R, ranks=ranks, means=(None, means), alternations=alternations)
    factors = (tucker.left.T, (L @ tucker.left.T).mT, R @ tucker.right.T, precond.undo(tucker.right))
    factors = (factor.to(W_o.dtype).contiguous() for factor in factors)
    return JointVO(*factors, tucker.loss_history, tucker.loss_history[-1])


@torch.no_grad()
def vo_bias(
    W_o: Tensor, W_v: Tensor, factors: JointVO, *, mean: Tensor, b_v: Tensor | None = None, b_o: Tensor | None = None
) -> Tensor:
    r"""Output bias of the compressed pair, with the value bias folded in.

    :math:`\hat b_o = b_o + \sum_i W_{o,i}(W_{v,g}\mu + b_{v,g}) - B_o A_{o,i} B_{v,g} A_v \mu` and :math:`\hat b_v =
    0`: LatentLLM Eq. 193, summed over heads (the paper writes a ``b_o`` per head; there is one). Folding is exact
    because attention weights sum to 1, with or without GQA.

    Args:
        W_o, W_v: as in :func:`joint_vo`.
        factors: its result.
        mean: ``(d,)`` mean input, fp32 or fp64.
        b_v: ``(K, h)`` or None.
        b_o: ``(d_out,)`` or None.

    Returns:
        ``(d_out,)``, dtype of ``W_o``.

    Raises:
        ValueError: shapes disagree.
    """
    (H, d_out, h), K = W_o.shape, W_v.shape[0]
    if (
        mean.shape != W_v.shape[2:]
        or (b_v is not None and b_v.shape != (K, h))
        or (b_o is not None and b_o.shape != (d_out,))
    ):
        raise ValueError(f"mean must be ({W_v.shape[2]},), b_v ({K}, {h}) and b_o ({d_out},) or None; got other shapes")
    B_o, A_o, B_v, A_v = (factor.to(mean) for factor in factors[:4])
    values = W_v.to(mean) @ mean + (0 if b_v is None else b_v.to(mean))  # (K, h)
    latent = B_v @ (A_v @ mean)
    dense = torch.einsum("ioh,ih->o", W_o.to(mean), values.repeat_interleave(H // K, 0))
    kept = B_o @ torch.einsum("irh,ih->r", A_o, latent.repeat_interleave(H // K, 0))
    return (dense - kept + (0 if b_o is None else b_o.to(mean))).to(W_o.dtype)


@torch.no_grad()
def attention_aware_output(
    W_o: Tensor, W_v: Tensor, factors: JointVO, precond: Preconditioner, C_o: Tensor, *, rank: int, ridge: float = 1e-8
) -> AttentionAwareOutput:
    r"""Refit the output side to what attention really sends into it.

    ``C_o`` is the second moment of the dense o-projection input, all heads together (LatentLLM App. G.2, Eq. 203), so
    errors of different heads may cancel. Tokens are predicted from values by ``x = N_g v``, ``N_g = P (W_v,g P)^+``
    (Eq. 205, with ``P`` in place of the identity: the best linear guess for tokens of moment ``P P``); then
    compressed values are ``E_g v``, ``E_g = B_v,g A_v N_g``, and with ``E`` block-diagonal

    .. math:: \min_{\operatorname{rank} \hat W_o \le r} \|(W_o - \hat W_o E) C_o^{1/2}\|^2

    has a closed form (reduced-rank regression). Two points differ from the paper. Its ``B_o`` (left singular vectors
    of ``W_o C_o^(1/2)``) is optimal only if ``E`` is invertible; the regression target must be projected first. And
    its update of ``A_v`` (Eq. 222) is left out: predicted tokens fill only ``h`` dims per head, so for ``r_v >= h``
    ANY generic ``A_v`` has zero loss there. ``A_v``, ``B_v`` stay those of :func:`joint_vo`. (Eq. 211-223 write
    ``C_0`` for ``C_o``.)

    Args:
        W_o: ``(H, d_out, h)``.
        W_v: ``(K, h, d)``.
        factors: from :func:`joint_vo`; its value side is kept.
        precond: the one used there.
        C_o: ``(H h, H h)``, heads in order; centre it if the bias is updated.
        rank: ``r_o``, in ``[1, min(d_out, H h)]``.
        ridge: relative damping of the regression.

    Raises:
        ValueError: shapes disagree, rank out of range, non-finite input.

    Cost: O((H h)^3) once.
    """
    _check(W_o, W_v, precond)
    H, d_out, h = W_o.shape
    check_moment(C_o, H * h, name="C_o")
    if not 1 <= rank <= min(d_out, H * h):
        raise ValueError(f"rank must be in [1, {min(d_out, H * h)}], got {rank}")
    flat = W_o.to(C_o).transpose(0, 1).flatten(1)  # (d_out, H h)
    predict = torch.linalg.pinv(precond.apply(W_v).to(C_o))  # (K, d, h): u = P^+ x from v
    E = factors.B_v.to(C_o) @ precond.apply(factors.A_v).to(C_o) @ predict  # (K, h, h)
    E = torch.block_diag(*E.repeat_interleave(H // W_v.shape[0], 0))
    cross, moment = flat @ C_o @ E.T, psd_root(E @ C_o @ E.T, ridge=ridge)
    whitened = cross @ moment.inverse
    B_o = fix_signs(torch.linalg.svd(whitened, full_matrices=False).U[:, :rank])
    A_o = B_o.T @ whitened @ moment.inverse  # (r_o, H h)
    error = metric_error(flat - B_o @ (A_o @ E), flat, C_o)
    A_o = A_o.unflatten(1, (H, h)).transpose(0, 1)
    return AttentionAwareOutput(B_o.to(W_o.dtype), A_o.to(W_o.dtype).contiguous(), E, error)


def _check(W_o: Tensor, W_v: Tensor, precond: Preconditioner) -> None:
    d = precond.width
    if W_o.ndim != 3 or W_v.ndim != 3 or W_o.shape[2] != W_v.shape[1] or W_v.shape[2] != d:
        raise ValueError(
            f"W_o (H, d_out, h) and W_v (K, h, {d}) expected, got {tuple(W_o.shape)} and {tuple(W_v.shape)}"
        )
    check_heads(W_o, W_v, "value")
