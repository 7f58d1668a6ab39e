"""What surrounds the product of queries and keys: rotation, masks, and attention by its formula.

Shape legend: B batch, T new tokens, S cached tokens, H query heads, R kept query-key width, V kept value width.
"""

import torch
from torch import nn
from transformers.cache_utils import Cache


def by_place(names, args):
    """Arguments given by place, by their names; torch.compile of PyTorch 2.9 traces no zip of another length."""
    return {names[place]: value for place, value in enumerate(args)}


def take_cache(kwargs):
    """Take the cache of keys and values out of what an attention is called with; ``None`` where there is none.

    Families name it ``past_key_values`` or ``layer_past``, and all of them ``cache`` from transformers 5.24 on; what
    else comes as ``cache`` are the pages of continuous batching.
    """
    found = [kwargs.pop("past_key_values", None), kwargs.pop("layer_past", None)]
    if "cache" in kwargs and isinstance(kwargs["cache"], Cache | None):
        found.append(kwargs.pop("cache"))
    return next((past for past in found if past is not None), None)


def rotary_table(cos, sin, half, interleaved):
    """Cosine and sine of every rotary pair, and of one that does not turn, (B or 1, T, 2, half + 1).

    It stays with the tensor of a model's cosines, so that only the first layer of a forward makes it.
    """
    kept = None if torch.compiler.is_compiling() else getattr(cos, "rankfold_table", None)
    if kept is not None and kept[0] == (half, interleaved):
        return kept[1]
    once = slice(None, None, 2) if interleaved else slice(half)
    turns = cos[..., once], sin[..., once]  # the model's tables say all angles twice
    still = cos.new_ones(*cos.shape[:-1], 1)
    table = torch.cat([turns[0], still, turns[1], torch.zeros_like(still)], -1).unflatten(-1, (2, half + 1))
    if not torch.compiler.is_compiling():
        cos.rankfold_table = (half, interleaved), table
    return table


def turn(x, cos, sin):
    """Turn pairs of dimensions, as many as there are angles; what comes after them stays."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [a * cos - b * sin, b * cos + a * sin]
    return torch.cat([*turned, rest] if rest.shape[-1] else turned, dim=-1).to(x.dtype)  # some tables are fp32 always


def add_alibi(alibi, mask, batch, heads, dtype):
    """Attention-with-linear-biases as an additive (B, H, 1 or T, S) mask."""
    alibi = alibi.view(batch, heads, 1, -1).to(dtype)
    if mask is None:
        return alibi
    if mask.dtype == torch.bool:
        return torch.where(mask, alibi, torch.finfo(dtype).min)
    return alibi + mask


def add_bias(bias, hidden, length, dtype):
    """The same as an additive mask: a bias (H, 1, positions) on the last positions, but for those that are hidden."""
    bias = bias[None, :, :, -length:].to(dtype)
    return bias if hidden is None else bias.masked_fill(hidden, torch.finfo(dtype).min)


def angles_at(positions, base, rotary_dim):
    """Cosine and sine, (B or 1, T, rotary_dim / 2), of every position and pair."""
    places = torch.arange(0, rotary_dim, 2, device=positions.device).float()
    angles = positions[..., None] * base ** -(places / rotary_dim)
    return angles.cos(), angles.sin()


def grown_at(positions, factor, step):
    """By what queries are multiplied at every position, (B or 1, T, 1, 1): the scale of Llama 4 for long texts."""
    return (1 + factor * torch.log1p(torch.floor(positions / step)))[..., None, None]


def within(window, mask, new, length, device):
    """A causal mask without what is ``window`` or more positions back."""
    back = torch.arange(length - new, length, device=device)[:, None] - torch.arange(length, device=device)
    if mask is None:
        return (back >= 0) & (back < window)
    if mask.dtype == torch.bool:
        return mask & (back < window)
    return mask.masked_fill(back >= window, torch.finfo(mask.dtype).min)


def of_one_length(ends):
    """Rows of sequences one after the other, (B, T) for every length there is; ``ends`` of each after a zero."""
    lengths = ends.diff()
    return [ends[:-1][lengths == T, None] + torch.arange(T, device=ends.device) for T in lengths.unique().tolist() if T]


def masked(scores, mask, softcap):
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        return scores
    return torch.where(mask, scores, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask


def shares(scores, sinks):
    """What of each token (B, H, T, S) attention takes, fp32; a sink (H,) is a score more, whose share goes nowhere."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink], -1), dim=-1, dtype=torch.float32)[..., :-1]


def eager_attention(module, query, key, value, mask, scaling, dropout=0.0, softcap=None, s_aux=None, **kwargs):
    """Attention by its formula; (B, T, H, V) and the weights (B, H, T, S)."""
    groups = module.num_key_value_groups
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = masked(query @ key.transpose(-1, -2) * scaling, mask, softcap)
    weights = shares(scores, s_aux).to(query.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


def attend_one(query, key, value, mask, scaling, softcap=None, sinks=None):
    """Attention of one token: the output (B, H, V) and the weights (B, H, S).

    Queries (B, H, 1, R) go to keys (B, heads, S, R) and values (B, other heads, S, V), whose numbers of heads divide H.
    """
    B, H = query.shape[:2]
    grouped = query.reshape(B * key.shape[1], -1, query.shape[-1])
    scores = torch.baddbmm(query.new_empty(()), grouped, key.flatten(0, 1).transpose(1, 2), beta=0, alpha=scaling)
    weights = shares(masked(scores.view(B, H, 1, -1), mask, softcap), sinks).to(value.dtype)
    grouped = weights.view(B * value.shape[1], -1, value.shape[2])
    return torch.bmm(grouped, value.flatten(0, 1)).view(B, H, -1), weights[:, :, 0]
