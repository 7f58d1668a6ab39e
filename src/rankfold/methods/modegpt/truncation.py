"""Modules of given ranks out of the first units and dimensions: only their shapes matter, to those who time them.

Shape legend: K key/value heads, R kept query-key width.
"""

import torch

from ...architectures import AttentionView, BlockView, Dense
from ..base import BlockResult
from ..result import put_attention, put_projection
from .attention import take_heads
from .norms import first_norms


def truncate_mlp(view: BlockView, rank: int, result: BlockResult) -> None:
    """The MLP of the first ``rank`` hidden units."""
    mlp = view.mlp
    keep = torch.arange(rank, device=view.device)
    for path, projection in mlp.rising().items():
        put_projection(result, path, projection.rows(mlp.rows_of(keep)))
    put_projection(result, mlp.spec.down, Dense(mlp.down.weight[:, :rank].contiguous(), mlp.down.bias))


def truncate_attention(attention: AttentionView, ranks: dict[str, int], result: BlockResult) -> None:
    """Attention on the first dimensions of every head, rotary pairs kept whole."""
    heads, kv_heads, full = attention.heads, attention.kv_heads, attention.head_dim
    qk, vo, (q, k, v), o = ranks.get("qk", full), ranks.get("vo", full), attention.qkv(), attention.output
    first = torch.arange(max(qk, vo), device=o.weight.device)
    columns = take_heads(Dense(o.weight.T, None), first[:vo].expand(heads, -1))
    projections = {
        "q": take_heads(q, first[:qk].expand(heads, -1)),
        "k": take_heads(k, first[:qk].expand(kv_heads, -1)),
        "v": take_heads(v, first[:vo].expand(kv_heads, -1)),
        "o": Dense(columns.weight.T.contiguous(), o.bias),
    }
    selected = attention.rotary_dim and qk < full
    own = first[: qk // 2].clamp_max(attention.rotary_dim // 2)  # after the last frequency: does not turn
    pairs = own.expand(kv_heads, -1) if selected else None  # (K, R / 2)
    norms = first_norms(attention, qk) if attention.norms and qk < full else None
    put_attention(result, attention, projections, qk, vo, pairs, norms=norms)
