"""Attention whose widths are not the head dimension.

Shape legend: B batch, T new tokens, S cached tokens, H query heads, K key/value heads, G = H / K, R kept query-key
width, V kept value width, P = R / 2 rotary pairs.
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .descriptions import check_attention
from .kernels import (
    add_alibi,
    add_bias,
    angles_at,
    attend_one,
    by_place,
    eager_attention,
    grown_at,
    of_one_length,
    rotary_table,
    take_cache,
    turn,
    within,
)
from .latent import LatentRows
from .layers import build_layer
from .norms import PredictedNorm
from .tensors import check_range


class CompressedAttention(nn.Module):
    """Self-attention whose query-key width R and value width V need not be the head dimension.

    It stands in for the attention module of any family: it takes the names each of them is called with, and differs
    from them in three things only. The softmax scale is stored (it belongs to the ORIGINAL head dimension). Rotary
    pairs are chosen per key/value head, by an index into the model's own cos/sin table, so that a reduced key is still
    a rotated key. And keys and values may have different widths, so the cache holds ``K * (R + V)`` numbers per token.
    """

    # Layers; keys and values may be rows of a shared latent.
    qkv_proj: Any
    q_proj: Any
    k_proj: Any
    v_proj: Any
    rotary_pairs: torch.Tensor | None

    def __init__(self, spec: dict, config, layer_idx: int | None, names: tuple[str, ...] = ()):
        super().__init__()
        check_attention(spec)
        self.config, self.layer_idx = config, layer_idx
        self.names = names  # of what is passed by place after the hidden states
        self.is_asked_for_weights = {"alibi", "output_attentions"} <= set(names)  # Falcon; sdpa gives others none
        self.heads, self.kv_heads = spec["heads"], spec["kv_heads"]
        self.num_key_value_groups = self.heads // self.kv_heads  # the name transformers' attention kernels read
        self.qk_dim, self.vo_dim = spec["qk_dim"], spec["vo_dim"]
        self.scaling, self.softcap = spec["scaling"], spec.get("softcap")
        self.sliding_window = spec.get("sliding_window")
        self.window = spec.get("window")  # of a family whose attention masks what is further back itself
        self.attention_dropout = spec.get("dropout", 0.0)
        self.output_dropout = spec.get("output_dropout", 0.0)
        self.is_causal = spec.get("causal", True)
        self.adds_alibi = spec.get("alibi", False)  # Falcon passes ALiBi too, but has already put it into the mask
        self.rotary_dim, self.interleaved_table = spec.get("rotary_dim", 0), spec.get("interleaved_table", False)
        self.rotary_base = spec.get("rotary_base")  # of a family whose attention makes its angles itself
        self.growth, self.growth_step = spec.get("growth"), spec.get("growth_step")  # of queries, with their position
        self.o_proj = build_layer(spec["o"]) if "o" in spec else None  # in BERT it belongs to what surrounds this
        self.qkv_proj = build_layer(spec["qkv"]) if "qkv" in spec else None  # one latent that all three share
        if self.qkv_proj is None:
            self.q_proj, self.k_proj, self.v_proj = (build_layer(spec[name]) for name in ("q", "k", "v"))
        else:
            self.widths = (self.heads * self.qk_dim, self.kv_heads * self.qk_dim, self.kv_heads * self.vo_dim)
            q, k, v = self.widths
            self.k_proj, self.v_proj = LatentRows(self.qkv_proj, q, q + k), LatentRows(self.qkv_proj, q + k, q + k + v)
        # Which side caches its latent instead of heads: keys only where nothing rotates or normalises them afterwards.
        self.latent_keys, self.latent_values = "k" in spec.get("latent_cache", ()), "v" in spec.get("latent_cache", ())
        self.q_norm = self.k_norm = None  # adopted from the dense module by `build` where the family has them
        if spec.get("sinks"):  # transformers' paged attention takes any attribute of this name for sinks
            self.sinks = nn.Parameter(torch.empty(self.heads))
        over = spec.get("norm_over", "head")
        self.norms_all_heads = over == "all heads" and not spec.get("predicted_norms")
        if spec.get("predicted_norms"):
            self.q_norm, self.k_norm = (PredictedNorm(n, self.qk_dim, over) for n in (self.heads, self.kv_heads))
        if spec.get("selected_pairs"):
            # Row p of head k says which rotary frequency pair p turns with; `rotary_dim / 2` means "does not turn".
            # A list: PyTorch clamps on the meta device in Python, 17 ms at a time.
            pairs = torch.tensor([min(p, self.rotary_dim // 2) for p in range(self.qk_dim // 2)], dtype=torch.int32)
            self.register_buffer("rotary_pairs", pairs.repeat(self.kv_heads, 1))
        else:
            self.rotary_pairs = None

    @property
    def _sinks(self) -> nn.Parameter | None:
        return getattr(self, "sinks", None)

    def check_indices(self, name: str) -> None:
        """Raise :class:`ValueError` where a pair turns with a frequency that there is not."""
        if self.rotary_pairs is not None:
            check_range(self.rotary_pairs, self.rotary_dim // 2 + 1, f"{name}.rotary_pairs")

    def forward(self, hidden_states, *args, **kwargs):
        return self._forward(hidden_states, **by_place(self.names, args), **kwargs)

    def _forward(self, hidden_states, *, residual=None, **kwargs):
        output, weights = self.mix(hidden_states, take_cache(kwargs), **kwargs)
        output = self._sent(output)
        return (output if residual is None else output + residual), weights

    def _sent(self, mixed):
        """What the output projection makes of values that were mixed."""
        output = mixed if self.o_proj is None else self.o_proj(mixed)
        if self.training and self.output_dropout:
            output = nn.functional.dropout(output, self.output_dropout)
        return output

    def mix(self, hidden_states, past, *, position_embeddings=None, **kwargs):
        """Values as attention mixes them, (B, T, H V), and its weights."""
        if not self.vo_dim:
            return self._nothing(hidden_states, past), None
        query, key, value = self._project(hidden_states)
        query, key = self._turned(query, self._keys(key), position_embeddings, kwargs)
        key, value = key.transpose(1, 2), self._values(value).transpose(1, 2)
        if past is None:
            return self._attend(query, key, value, **kwargs)
        return self._attend_cached(query, *past.update(key, value, self.layer_idx), **kwargs)

    def _nothing(self, hidden_states, past):
        """Return values of no heads.

        The cache gets one number of each token and so counts them: models and masks ask one layer for how many there
        are, and to transformers a cache without numbers is an empty one.
        """
        nothing = hidden_states[..., :0]
        if past is not None:
            past.update(hidden_states[:, None, :, :1], nothing[:, None], self.layer_idx)
        return nothing

    def _project(self, x):
        """Project to queries, keys and values, (B, T, width) each."""
        if self.qkv_proj is not None:
            return self.qkv_proj(x).split(self.widths, -1)
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def _keys(self, x):
        return self._normalised(x, self.k_norm)  # (B, T, K, R)

    def _values(self, x):
        return x.view(*x.shape[:2], self.kv_heads, self.vo_dim)  # (B, T, K, V)

    def _normalised(self, x, norm):
        """(B, T, heads, R)"""
        if norm is not None and self.norms_all_heads:
            x = norm(x)
        x = x.view(*x.shape[:2], -1, self.qk_dim)
        return x if norm is None or self.norms_all_heads else norm(x)

    def _turned(self, query, key, tables, kwargs):
        """Normalise queries (B, T, H R); turn them and keys (B, T, K, R) where the family does; (B, H, T, R), keys."""
        query = self._normalised(query, self.q_norm)
        if self.rotary_base is not None:
            tables = angles_at(kwargs["position_ids"], self.rotary_base, self.rotary_dim)
        if self.rotary_dim:
            query, key = self._rotate(query, key, *tables)
        if self.growth:
            query = query * grown_at(kwargs["position_ids"], self.growth, self.growth_step).to(query.dtype)
        return query.transpose(1, 2), key

    def _rotate(self, query, key, cos, sin):
        """Rotary embedding, Hugging Face's half layout: dimension p turns together with dimension p + P.

        The queries of a group turn as their key, so one product turns both.
        """
        table = rotary_table(cos, sin, self.rotary_dim // 2, self.interleaved_table)  # (B, T, 2, pairs + 1)
        if self.rotary_pairs is None:  # all pairs in place, then the dimensions that never turn
            cos, sin = table[:, :, :, None, None, :-1].unbind(2)
        else:
            table = table.index_select(-1, self.rotary_pairs.flatten())
            cos, sin = table.unflatten(-1, (self.kv_heads, 1, -1)).unbind(2)  # (B, T, K, 1, P)
        both = torch.cat([query.unflatten(2, (self.kv_heads, -1)), key[..., None, :]], -2)  # (B, T, K, G + 1, R)
        both = turn(both, cos, sin)
        return both[..., :-1, :].flatten(2, 3), both[..., -1, :]

    def _attend_cached(self, query, key, value, **kwargs):
        """Attend to all tokens of a cache.

        One new token on a CPU takes two products: that is faster than the kernel for many queries, which also wants
        keys and values of one width.
        """
        stock = self.config._attn_implementation != "sdpa" or query.device.type != "cpu" or "cache" in kwargs
        if query.shape[2] > 1 or stock or self.training or self._is_asked(kwargs):
            return self._attend(query, key, value, **kwargs)
        mask = self._masked(query, key.shape[2], **kwargs)
        mixed, _ = attend_one(query, key, value, mask, self.scaling, self.softcap, self._sinks)
        return mixed.reshape(mixed.shape[0], 1, -1), None

    def _attend(self, query, key, value, *, attention_mask=None, alibi=None, position_bias=None, **kwargs):
        """Attend by the function that transformers is set to."""
        mask = self._masked(query, key.shape[2], attention_mask, alibi, position_bias)
        if "cache" in kwargs:  # of pages, for the attention function; what one layer caches is named otherwise
            query, key, value = self._as_dense(query, key, value)
            if "cache" in self.names:  # from transformers 5.24 on the layer fills them, before that the function
                key, value = kwargs.pop("cache").update(key, value, self.layer_idx, kwargs=kwargs)
        elif query.shape[2] > 1 or key.shape[2] == 1 or "flash" in self.config._attn_implementation:
            # Of one token padding would copy the cache, so only kernels that take nothing else get it.
            query, key, value = self._evened(query, key, value)
        # vLLM looks for this call by these names, and puts its own attention in its place.
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        attention = eager_attention if self._is_asked(kwargs) else attention
        output, weights = attention(
            self,
            query,
            key,
            value,
            mask,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            **self._attending(),
            **kwargs,
        )
        output = output.reshape(query.shape[0], query.shape[2], self.heads, -1)
        return output[..., : self.vo_dim].flatten(2), weights

    def _is_asked(self, kwargs) -> bool:
        """Whether weights are asked for, of a family that has them then whatever the function."""
        return bool(self.is_asked_for_weights and kwargs.get("output_attentions"))

    def _masked(self, query, length, attention_mask=None, alibi=None, position_bias=None, **_):
        """Return the mask together with what the family adds to scores: ALiBi, a bias by position, or a window."""
        mask = attention_mask
        if self.adds_alibi and alibi is not None:
            mask = add_alibi(alibi, mask, query.shape[0], self.heads, query.dtype)
        if position_bias is not None:
            mask = add_bias(position_bias, mask, length, query.dtype)
        if self.window:
            mask = within(self.window, mask, query.shape[2], length, query.device)
        return mask

    def _evened(self, query, key, value):
        """Fused kernels want one width for keys and values; zeros change neither the scores nor the kept outputs."""
        pad = self.qk_dim - self.vo_dim if self.config._attn_implementation != "eager" else 0
        if pad > 0:
            value = nn.functional.pad(value, (0, pad))
        elif pad < 0:
            query, key = nn.functional.pad(query, (0, -pad)), nn.functional.pad(key, (0, -pad))
        return query, key, value

    def _as_dense(self, *states):
        """As wide as the dense model's heads, for continuous batching: its pages are made by the config."""
        width = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        heads = getattr(self.config, "num_key_value_heads", self.config.num_attention_heads)
        if heads != self.kv_heads:
            raise ValueError(
                f"continuous batching has pages for {heads} heads of keys and values by the config, and this attention "
                f"has {self.kv_heads}; use generate, or vLLM"
            )
        return (nn.functional.pad(x, (0, width - x.shape[-1])) for x in states)

    def _attending(self) -> dict:
        """Options of attention that the family has."""
        options = {"softcap": self.softcap, "sliding_window": self.sliding_window, "s_aux": self._sinks}
        return {name: value for name, value in options.items() if value is not None}


class PackedAttention(CompressedAttention):
    """Over sequences one after the other, without a batch dimension: images of any size in Qwen-VL's towers."""

    def _forward(self, hidden_states, **kwargs):
        return super()._forward(hidden_states, **kwargs)[0]

    def mix(self, hidden_states, past, *, cu_seqlens, position_embeddings, **_):
        together, mixed = of_one_length(cu_seqlens), []
        for rows in together:
            tables = tuple(table[rows] for table in position_embeddings)
            mixed.append(super().mix(hidden_states[rows], past, position_embeddings=tables)[0].flatten(0, 1))
        return torch.cat(mixed)[torch.cat([rows.flatten() for rows in together]).argsort()], None
