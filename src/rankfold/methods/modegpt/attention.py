"""Types II and III in a block: one smaller attention module.

Shape legend: H query heads, K key/value heads, G = H / K, N head dimension, R kept query-key width, V kept value width,
D model width.
"""

import torch
from torch import Tensor

from ...architectures import AttentionView, BlockView, Dense
from ...linalg.column_row import column_row, column_row_bounds
from ...linalg.paired_svd import paired_svd
from ..base import BlockResult
from ..result import put_attention


def per_head(dense: Dense, heads: int) -> tuple[Tensor, Tensor | None]:
    """``(heads, N, D)`` weight and ``(heads, N)`` bias."""
    bias = None if dense.bias is None else dense.bias.unflatten(0, (heads, -1))
    return dense.weight.unflatten(0, (heads, -1)), bias


def map_heads(dense: Dense, maps: Tensor) -> Dense:
    """Multiply the rows of every head by its ``(R, N)`` map; ``maps`` is ``(heads, R, N)``."""
    weight, bias = per_head(dense, len(maps))
    new = (maps @ weight.to(maps)).flatten(0, 1).to(dense.weight.dtype)
    return Dense(new, None if bias is None else (maps @ bias.to(maps).unsqueeze(-1)).flatten().to(bias.dtype))


def take_heads(dense: Dense, keep: Tensor) -> Dense:
    """Keep the rows ``keep[i]`` of head ``i``; ``keep`` is ``(heads, R)``."""
    offsets = torch.arange(len(keep), device=keep.device)[:, None] * (dense.weight.shape[0] // len(keep))
    return dense.rows((keep + offsets).flatten())


def decompose_attention(method, view: BlockView, moments, ranks: dict[str, int], result: BlockResult) -> None:
    """Replace the attention module by one with width ``ranks["qk"]`` for scores and ``ranks["vo"]`` for values."""
    attention = view.attention
    full = attention.head_dim
    qk_rank, vo_rank = ranks.get("qk", full), ranks.get("vo", full)
    q, k, v = attention.qkv()
    o = attention.output
    pairs = None
    if qk_rank < full:
        q, k, pairs, result.reports["qk"] = compress_qk(method, attention, moments, q, k, qk_rank)
    elif "qk" in ranks:
        result.reports["qk"] = {"rank": full, "of": full, "relative_error": 0.0}
    if vo_rank < full:
        v, o, result.reports["vo"] = compress_vo(method, attention, moments, v, o, vo_rank)
    elif "vo" in ranks:
        result.reports["vo"] = {"rank": full, "of": full, "relative_error": 0.0}
    if qk_rank == vo_rank == full:
        return
    put_attention(result, attention, {"q": q, "k": k, "v": v, "o": o}, qk_rank, vo_rank, pairs)


def compress_qk(method, attention: AttentionView, moments, q: Dense, k: Dense, rank: int):
    """New q, k, the kept rotary pairs ``(K, R / 2)`` or ``None``, and the report."""
    C_q = moments["query"].C.unflatten(0, (attention.kv_heads, -1))  # (K, G, N, N)
    C_k = moments["key"].C  # (K, N, N)
    if attention.rotary_dim == 0 and method.qk == "svd":
        return _free_qk(C_q, C_k, q, k, rank, attention.head_dim)
    choices = [column_row(a, b, rank=rank, rotary_dim=attention.rotary_dim) for a, b in zip(C_q, C_k, strict=True)]
    keep = torch.stack([c.keep for c in choices])  # (K, R)
    group_keep = keep.repeat_interleave(C_q.shape[1], dim=0)
    pairs = torch.stack([c.pairs for c in choices]) if attention.rotary_dim else None
    report = {"rank": rank, "of": attention.head_dim, "form": "cr", **_selection_error(moments, keep)}
    return take_heads(q, group_keep), take_heads(k, keep), pairs, report


def _selection_error(moments, keep: Tensor) -> dict:
    """Measured error of a selection, summed over heads, and the paper's bounds, per sequence position pair.

    Dropping the set D costs exactly ``sum_{i,j in D} M_ij`` with ``M = sum_n (Q_n^T Q_n) o (K_n^T K_n)`` (before the causal
    mask). Theorem 2 bounds it by the product of the two sums over all sequences.
    """
    product, query, key = moments["query_key"], moments["query"], moments["key"]
    groups = len(product.second) // len(keep)
    total = product.second.sum().item()
    error = theorem = proposition = 0.0
    for head, M in enumerate(product.second):
        kept = keep[head // groups]
        dropped = torch.ones(M.shape[-1], dtype=torch.bool, device=M.device)
        dropped[kept] = False
        error += M[dropped][:, dropped].sum().item()
        sums = query.second[head : head + 1], key.second[head // groups]
        bound = column_row_bounds(*(s.double() for s in sums), kept)
        theorem, proposition = theorem + bound[0], proposition + bound[1]
    return {
        "relative_error": (max(error, 0.0) / total) ** 0.5 if total > 0 else 0.0,
        "error": error / product.count,
        "theorem_2": theorem / product.count,
        "proposition_2": proposition / product.count,
    }


def _free_qk(C_q: Tensor, C_k: Tensor, q: Dense, k: Dense, rank: int, full: int):
    """No rotation between queries and keys: the optimum is an SVD, biases included in the moments."""
    fits = [paired_svd(b, a.sum(0), rank=rank) for a, b in zip(C_q, C_k, strict=True)]
    down = torch.stack([f.down for f in fits])  # (K, R, N)
    up = torch.stack([f.up.T for f in fits]).repeat_interleave(C_q.shape[1], dim=0)  # (H, R, N)
    report = {"rank": rank, "of": full, "form": "svd", **_summed(fits)}
    return map_heads(q, up), map_heads(k, down), None, report


def _summed(fits) -> dict:
    """Error over all heads; for an SVD Theorem 3 and Proposition 3 state this number, not a bound on it."""
    error, total = sum(f.error for f in fits), sum(f.singular_values.square().sum().item() for f in fits)
    return {"relative_error": (error / total) ** 0.5 if total > 0 else 0.0, "error": error}


def compress_vo(method, attention: AttentionView, moments, v: Dense, o: Dense, rank: int):
    """New v, o and the report; Algorithm 3, jointly over the query heads that share a value head.

    Attention weights sum to one, so a constant passes through them: where the output projection has a bias, the value
    bias and the mean of the values move into it and the covariance is fitted. Elsewhere nothing may be added, so the
    second moment (value bias included) is fitted and the value bias is mapped with its dimensions.
    """
    moment, K = moments["value"], attention.kv_heads
    refit = method.bias_refit and o.bias is not None
    A = moment.covariance if refit else moment.C  # (K, N, N)
    W_o = o.weight.unflatten(1, (K, -1, attention.head_dim)).to(A)  # (D, K, G, N)
    B = torch.einsum("dkgn,dkgm->knm", W_o, W_o)
    best = [paired_svd(a, b, rank=rank) for a, b in zip(A, B, strict=True)]
    if method.gqa == "joint" or attention.heads == K:
        fits = best
    else:
        fits = [paired_svd(a, torch.eye(len(a)).to(a), rank=rank) for a in A]
    down, up = torch.stack([f.down for f in fits]), torch.stack([f.up for f in fits])  # (K, R, N), (K, N, R)
    new_o = torch.einsum("dkgn,knr->dkgr", W_o, up).flatten(1).to(o.weight.dtype)
    bias, new_v = o.bias, map_heads(v, down)
    if refit:
        mean = moment.mean  # (K, N), value bias included
        gone = mean - (up @ (down @ (mean - _bias_of(v, K, mean)).unsqueeze(-1))).squeeze(-1)
        bias = (o.bias.double() + torch.einsum("dkgn,kn->d", W_o, gone)).to(o.bias.dtype)
        new_v = Dense(new_v.weight, None)
    report = {"rank": rank, "of": attention.head_dim, **_vo_error(A, B, down, up, sum(f.error for f in best))}
    return new_v, Dense(new_o, bias), report


def _bias_of(v: Dense, kv_heads: int, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if v.bias is None else v.bias.unflatten(0, (kv_heads, -1)).to(like)


def _vo_error(A: Tensor, B: Tensor, down: Tensor, up: Tensor, optimum: float) -> dict:
    """Error of a value-output factor pair in the metric of the output projections, summed over heads.

    ``proposition_3`` is the optimum, which Theorem 3 and Proposition 3 state; the joint form reaches it.
    """
    gap = torch.eye(A.shape[-1]).to(A) - up @ down
    error = _trace(B @ gap @ A @ gap.mT)
    total = _trace(B @ A)
    return {
        "relative_error": (max(error, 0.0) / total) ** 0.5 if total > 0 else 0.0,
        "error": error,
        "proposition_3": optimum,
    }


def _trace(x: Tensor) -> float:
    return x.diagonal(dim1=-2, dim2=-1).sum().item()
