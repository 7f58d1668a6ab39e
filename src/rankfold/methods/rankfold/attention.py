"""Attention in two steps: queries, keys and values to smaller heads, then the output projection on what these send.

Shape legend: H query heads, K key/value heads, G = H / K, N head dimension, R kept value width, D model width.
"""

from collections.abc import Callable

from torch import Tensor

from ..._utils.present import present
from ...architectures import AttentionView, BlockView, Dense
from ...calibration.moments import BlockMoments, Moment
from ...linalg.output_refit import refit_across_heads
from ...linalg.paired_svd import paired_factors
from ...linalg.psd import relative
from ..base import BlockResult
from ..modegpt.attention import (
    GRADIENT,
    CompressedHalf,
    compress_attention,
    identities,
    in_papers_form,
    map_heads,
    values_move,
)
from ..modegpt.attention import compress_vo as values_alone
from ..modegpt.mlp import relative_ridge
from ..modegpt.output_weighting import output_root, predicted_loss, weighted
from .remove_module import without_attention
from .residual_correction import repair


def decompose_attention(method, view: BlockView, moments, ranks: dict[str, int]) -> BlockResult:
    """Replace the attention module by one with width ``ranks["qk"]`` for scores and ``ranks["vo"]`` for values."""
    if ranks.get("vo") == 0:
        return without_attention(method, view, moments)
    result = BlockResult()
    compress_attention(method, view, moments, ranks, result, vo=values_of(method, view))
    return result


def values_of(method, view: BlockView):
    """What reduces values and output."""
    return compress_vo if method.attends(view) else values_alone


def compress_vo(method, attention: AttentionView, moments, dense: dict[str, Dense]) -> Callable[[int], CompressedHalf]:
    """Return the values and outputs of any rank: Algorithm 3 on what attention sends, then a refit across heads.

    Attention averages values, so what it sends has another second moment than the values have. Where the output
    projection has a bias, the value bias and the mean move into it and the covariance is fitted, as in MoDeGPT.
    """
    v, o, K = dense["v"], dense["o"], attention.kv_heads
    sent = moments["attention_output"]
    centre = sent.mean if method.bias_refit and o.bias is not None else None  # (H N,), value bias included
    W = o.weight.double()

    def metric(moment: Moment) -> Tensor:
        return moment.second_moment() if centre is None else moment.about(centre)

    C, root = metric(sent), output_root(moments, GRADIENT)
    A, B = _of_heads(C, weighted(root, W), attention)
    if in_papers_form(method, attention):
        B = identities(A)
    factors, groups, ridge = paired_factors(A, B), attention.heads // K, relative_ridge(method, C, sent.count)

    def at(rank: int) -> CompressedHalf:
        fit = factors.truncated(rank)
        down = fit.down.repeat_interleave(groups, 0)  # (H, R, N)
        refit = refit_across_heads(W, C, down, fit.up.repeat_interleave(groups, 0), ridge=ridge)
        new_v, bias = map_heads(v, fit.down), o.bias
        if centre is not None:
            still = centre
            if v.bias is not None and values_move(method, attention):
                still = centre - v.bias.double().unflatten(0, (K, 1, -1)).expand(-1, groups, -1).flatten()
                new_v = Dense(new_v.weight, None)
            kept = refit.W @ (down @ still.unflatten(0, (len(down), -1, 1))).flatten()
            bias = (present(o.bias).double() + W @ centre - kept).to(present(o.bias).dtype)

        def errors(C: Tensor) -> dict[str, float]:
            error = refit.error(W, C)
            return {"relative_error": relative(error, ((W @ C) * W).sum().item()), "error": error}

        def error(other: BlockMoments) -> float:
            return errors(metric(other["attention_output"]))["relative_error"]

        report = errors(C)
        if root is not None:
            losses = [predicted_loss(moments[GRADIENT], M, C) for M in (refit.gap(W), W)]
            report |= {"weighted_error": relative(*losses), "predicted_loss": losses[0]}
        return CompressedHalf({"v": new_v, "o": Dense(refit.W.to(o.weight.dtype), bias)}, report, error)

    return at


def _of_heads(C: Tensor, W: Tensor, attention: AttentionView) -> tuple[Tensor, Tensor]:
    """``(K, N, N)`` each: moment of what a group of query heads sends, and Gram of the output columns that read it."""
    H, N, K = attention.heads, attention.head_dim, attention.kv_heads
    own = C.view(H, N, H, N).diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # (H, N, N)
    columns = W.unflatten(1, (H, N)).permute(1, 0, 2)  # (H, D, N)
    return own.unflatten(0, (K, -1)).sum(1), (columns.mT @ columns).unflatten(0, (K, -1)).sum(1)


def refit_output(method, view: BlockView, moments, held_out, module: str) -> BlockResult:
    """Correct the output projection by what the stream lacks after attention, as far as held-out samples confirm."""
    attention, others = view.attention, held_out()
    if others is None:  # nothing could confirm it
        return BlockResult(reports={module: {"residual_correction": 0.0}})
    o, names = attention.output, ("attention_output", "attention_feedback")
    centred = method.bias_refit and o.bias is not None
    new, report, _ = repair(o, moments, others, names, centred=centred)
    path = attention.output_path
    state = {f"{path}.weight": new.weight.to(o.weight.dtype)}
    if o.bias is not None:
        state[f"{path}.bias"] = present(new.bias).to(o.bias.dtype)
    return BlockResult(state=state, reports={module: report})
