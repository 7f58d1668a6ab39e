"""What surrounds the product of queries and keys: rotation, masks, and attention by its formula.

Shape legend: B batch, T new tokens, S cached tokens, H query heads, V kept value width.
"""

import torch
from torch import nn

__all__ = ["add_alibi", "eager_attention", "masked", "turn"]


def turn(x, cos, sin, half):
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)  # some tables are fp32 always


def add_alibi(alibi, mask, batch, heads, dtype):
    """Attention-with-linear-biases as an additive (B, H, 1 or T, S) mask."""
    alibi = alibi.view(batch, heads, 1, -1).to(dtype)
    if mask is None:
        return alibi
    if mask.dtype == torch.bool:
        return torch.where(mask, alibi, torch.finfo(dtype).min)
    return alibi + mask


def masked(scores, mask, softcap):
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        return scores
    return torch.where(mask, scores, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask


def eager_attention(module, query, key, value, mask, scaling, dropout=0.0, softcap=None, **kwargs):
    """Attention by its formula; (B, T, H, V) and the weights (B, H, T, S)."""
    groups = module.num_key_value_groups
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = masked(query @ key.transpose(-1, -2) * scaling, mask, softcap)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights
