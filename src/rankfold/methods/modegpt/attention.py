"""Types II and III in a block: one smaller attention module.

Shape legend: H query heads, K key/value heads, G = H / K, N head dimension, R kept query-key width, V kept value width,
D model width. All heads are decomposed together, and numbers leave the device once a module.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._utils.present import present
from ...architectures import AttentionView, BlockView, Dense
from ...calibration.moments import BlockMoments
from ...linalg.column_row import ColumnRow, column_row, column_row_bounds, eliminate_pairs
from ...linalg.paired_svd import PairedSVD, paired_factors
from ...linalg.psd import relative
from ..base import BlockResult
from ..result import put_attention
from .norms import predict_norms
from .output_weighting import output_root, weighted

GRADIENT = "o_gradient"
# Cost of dropping dimensions of queries and keys in all blocks, where all drop the same.
OF_MODEL = "query_key_of_model"


def compress_attention(
    method, view: BlockView, moments, ranks: dict[str, int], result: BlockResult, *, vo=None
) -> None:
    """Replace the attention module by one with width ``ranks["qk"]`` for scores and ``ranks["vo"]`` for values.

    ``vo`` stands in place of :func:`compress_vo`.
    """
    attention = view.attention
    full = attention.head_dim
    q, k, v = attention.qkv()
    projections = {"q": q, "k": k, "v": v, "o": attention.output}
    widths, pairs, norms = {"qk": full, "vo": full} | ranks, None, None
    for module, compress in (("qk", compress_qk), ("vo", vo or compress_vo)):
        if widths[module] < full:
            part = compress(method, attention, moments, projections)(widths[module])
            projections |= part.projections
            pairs, norms = (part.pairs, part.norms) if module == "qk" else (pairs, norms)
            result.reports[module] = {"rank": widths[module], "of": full} | part.report
            result.errors[module] = part.error
        elif module in ranks:
            result.reports[module] = {"rank": full, "of": full, "relative_error": 0.0}
    if widths["qk"] < full or widths["vo"] < full:
        put_attention(result, attention, projections, widths["qk"], widths["vo"], pairs, norms=norms)


class CompressedHalf(NamedTuple):
    """One half of an attention, compressed."""

    projections: dict[str, Dense]  # the new ones
    report: dict
    error: Callable[[BlockMoments], float]  # relative
    pairs: Tensor | None = None  # (K, R / 2) kept rotary pairs
    norms: dict[str, Tensor] | None = None  # of queries and keys, where they are normalised


def compress_qk(method, attention: AttentionView, moments, dense: dict[str, Dense]) -> Callable[[int], CompressedHalf]:
    """Return the queries and keys of any rank: Algorithm 2, or the optimum where nothing sits between them."""
    if is_free(method, attention):
        return _free_qk(attention, moments, dense)
    return partial(_selected_qk, method, attention, moments, dense)


def _selected_qk(method, attention: AttentionView, moments, dense: dict[str, Dense], rank: int) -> CompressedHalf:
    choice = _choose(method, attention, moments, rank)
    keep = choice.keep  # (K, R)
    C_q, C_k = (moments[name].second.double() for name in ("query", "key"))
    theorem, proposition = column_row_bounds(_grouped(C_q, attention), C_k, keep)
    parts = torch.stack([*_score_error(moments, keep), theorem.sum(), proposition.sum()]).tolist()
    pairs = moments["query_key"].count  # of a query and a key of one window, all of them: the mask is not used
    names = ("error", "theorem_2", "proposition_2")
    report: dict[str, Any] = {"form": "cr", "selection": method.selection_qk, "relative_error": relative(*parts[:2])}
    report |= {name: value / pairs for name, value in zip(names, (parts[0], *parts[2:]), strict=True)}
    projections = {"q": take_heads(dense["q"], _of_queries(keep, attention)), "k": take_heads(dense["k"], keep)}

    def error(other: BlockMoments) -> float:
        return relative(*torch.stack(_score_error(other, keep)).tolist())

    norms = None
    if attention.norms:
        norms, errors = predict_norms(attention, moments, (_of_queries(keep, attention), keep))
        report |= dict(zip(("query_norm_error", "key_norm_error"), errors, strict=True))
        report["expected_error"] = _with_norms(report["relative_error"], errors)
    return CompressedHalf(projections, report, error, choice.pairs if attention.rotary_dim else None, norms)


def is_free(method, attention: AttentionView) -> bool:
    """Whether nothing sits between queries and keys that would not let them be turned."""
    return attention.rotary_dim == 0 and not attention.norms and method.qk == "svd"


def _with_norms(error: float, norms: tuple[float, float]) -> float:
    """Relative error of the scores when those that are left are also multiplied by what the norms get wrong.

    A norm divides by the root of what is predicted, so its relative error is half of that; it is taken as
    independent of the scores.
    """
    wrong = sum(e**2 for e in norms) / 4
    return (error**2 + max(1 - error**2, 0.0) * wrong) ** 0.5


def _choose(method, attention: AttentionView, moments, rank: int) -> ColumnRow:
    sizes = {"rank": rank, "rotary_dim": attention.rotary_dim}
    if method.selection_qk == "norm":
        return column_row(
            _grouped(moments["query"].second_moment(), attention), moments["key"].second_moment(), **sizes
        )
    M = moments["query_key"].second.double()
    if OF_MODEL in moments:
        one = eliminate_pairs(moments[OF_MODEL].second.to(M), **sizes)
        return ColumnRow(*(part.expand(attention.kv_heads, -1) for part in one))
    return eliminate_pairs(_grouped(M, attention).sum(1), **sizes)


def _score_error(moments: BlockMoments, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Squared change of all scores by a selection, and squared scores, over heads and position pairs.

    Dropping the set D costs exactly ``sum_{i,j in D} M_ij`` with ``M = sum_n (Q_n^T Q_n) o (K~_n^T K~_n)``, the keys
    centred over the window (before the causal mask). Theorem 2 bounds it by the product of both sums over sequences.
    """
    M = moments["query_key"].second.double()  # (H, N, N)
    M = M.unflatten(0, (len(keep), -1)).sum(1)
    dropped = torch.ones(len(keep), M.shape[-1], dtype=M.dtype, device=M.device).scatter(1, keep, 0.0)
    return torch.einsum("kij,ki,kj->", M, dropped, dropped), M.sum()


def _free_qk(attention: AttentionView, moments, dense: dict[str, Dense]) -> Callable[[int], CompressedHalf]:
    """No rotation between queries and keys: the optimum is an SVD, biases included in the moments."""

    def metrics(these: BlockMoments) -> tuple[Tensor, Tensor]:
        return these["key_spread"].second_moment(), _grouped(these["query"].second_moment(), attention).sum(1)

    factors = paired_factors(*metrics(moments))

    def at(rank: int) -> CompressedHalf:
        fit = factors.truncated(rank)
        projections = {
            "q": map_heads(dense["q"], _of_queries(fit.up.mT, attention)),
            "k": map_heads(dense["k"], fit.down),
        }
        error, total = torch.stack(_pair_error(*metrics(moments), fit)).tolist()
        report = {"form": "svd", "relative_error": relative(error, total), "error": error}
        return CompressedHalf(
            projections, report, lambda other: relative(*torch.stack(_pair_error(*metrics(other), fit)).tolist())
        )

    return at


def in_papers_form(method, attention: AttentionView) -> bool:
    """Whether values are reduced without regard to the output projection, as the paper does for grouped queries."""
    return method.gqa == "paper" and attention.heads != attention.kv_heads


def identities(A: Tensor) -> Tensor:
    """Return the identity for every head of ``(K, N, N)``: the metric of an output projection that is not regarded."""
    return torch.eye(A.shape[-1]).to(A).expand_as(A)


def compress_vo(method, attention: AttentionView, moments, dense: dict[str, Dense]) -> Callable[[int], CompressedHalf]:
    """Return the values and outputs of any rank: Algorithm 3, jointly over the query heads that share a value head.

    Attention weights sum to one, so a constant passes through them: where the output projection has a bias, the value
    bias and the mean of the values move into it and the covariance is fitted. Elsewhere nothing may be added, and
    beside a sink a constant does not pass, so the second moment (value bias included) is fitted and the value bias is
    mapped with its dimensions.
    """
    v, o, K = dense["v"], dense["o"], attention.kv_heads
    centre = moments["value"].mean if values_move(method, attention) else None  # (K, N), value bias included
    root = output_root(moments, GRADIENT)
    W_o = o.weight.unflatten(1, (K, -1, attention.head_dim)).double()  # (D, K, G, N)
    B = torch.einsum("dkgn,dkgm->knm", W_o, W_o)

    def metrics(these: BlockMoments) -> tuple[Tensor, Tensor]:
        moment = these["value"]
        return (moment.second_moment() if centre is None else moment.about(centre)), B

    A, _ = metrics(moments)
    best = factors = paired_factors(A, B)
    if root is not None:
        heavy = weighted(root, W_o.flatten(1)).view_as(W_o)
        factors = paired_factors(A, torch.einsum("dkgn,dkgm->knm", heavy, heavy))
    elif in_papers_form(method, attention):
        factors = paired_factors(A, identities(A))

    def at(rank: int) -> CompressedHalf:
        fit = factors.truncated(rank)
        new_o = torch.einsum("dkgn,knr->dkgr", W_o, fit.up).flatten(1).to(o.weight.dtype)
        new_v, bias = map_heads(v, fit.down), o.bias
        if centre is not None:
            moved = 0 if v.bias is None else v.bias.unflatten(0, (K, -1)).to(centre)
            kept = fit.up @ (fit.down @ (centre - moved).unsqueeze(-1))
            sent = torch.einsum("dkgn,kn->d", W_o, centre - kept.squeeze(-1))
            bias = (present(o.bias).double() + sent).to(present(o.bias).dtype)
            new_v = Dense(new_v.weight, None)
        optimum = best.singular_values[..., rank:].square().sum()
        error, total, optimum = torch.stack([*_pair_error(A, B, fit), optimum]).tolist()
        report = {"relative_error": relative(error, total), "error": error, "proposition_3": optimum}
        if root is not None:
            report["weighted_error"] = relative(fit.error.sum().item(), fit.singular_values.square().sum().item())
        return CompressedHalf(
            {"v": new_v, "o": Dense(new_o, bias)},
            report,
            lambda other: relative(*torch.stack(_pair_error(*metrics(other), fit)).tolist()),
        )

    return at


def values_move(method, attention: AttentionView) -> bool:
    """Whether the bias of the output projection takes that of the values."""
    return method.bias_refit and attention.output.bias is not None and attention.averages


def _pair_error(A: Tensor, B: Tensor, fit: PairedSVD) -> tuple[Tensor, Tensor]:
    """``E||X v - X up down v||^2`` and ``E||X v||^2`` with ``A = E[v v^T]``, ``B = X^T X``, summed over heads."""
    gap = torch.eye(A.shape[-1]).to(A) - fit.up @ fit.down
    return ((B @ gap) * (gap @ A)).sum(), (B * A).sum()


def _grouped(per_query: Tensor, attention: AttentionView) -> Tensor:
    """``(K, G, ...)`` of ``(H, ...)``."""
    return per_query.unflatten(0, (attention.kv_heads, -1))


def _of_queries(per_key: Tensor, attention: AttentionView) -> Tensor:
    """``(H, ...)`` of ``(K, ...)``: what a key head does, its queries do."""
    return per_key.repeat_interleave(attention.heads // attention.kv_heads, 0)


def map_heads(dense: Dense, maps: Tensor) -> Dense:
    """Multiply the rows of every head by its ``(R, N)`` map; ``maps`` is ``(heads, R, N)``."""
    heads, dtype = len(maps), dense.weight.dtype
    weight = (maps @ dense.weight.unflatten(0, (heads, -1)).to(maps)).flatten(0, 1).to(dtype)
    if dense.bias is None:
        return Dense(weight, None)
    bias = dense.bias.unflatten(0, (heads, -1, 1)).to(maps)
    return Dense(weight, (maps @ bias).flatten().to(dense.bias.dtype))


def take_heads(dense: Dense, keep: Tensor) -> Dense:
    """Keep the rows ``keep[i]`` of head ``i``; ``keep`` is ``(heads, R)``."""
    offsets = torch.arange(len(keep), device=keep.device)[:, None] * (dense.weight.shape[0] // len(keep))
    return dense.rows((keep + offsets).flatten())
