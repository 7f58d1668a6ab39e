"""Attention whose widths are not the head dimension.

Shape legend: B batch, T new tokens, S cached tokens, H query heads, K key/value heads, G = H / K, R kept query-key
width, V kept value width, P = R / 2 rotary pairs.
"""

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .descriptions import check_attention
from .kernels import add_alibi, add_bias, angles_at, eager_attention, masked, of_one_length, shares, turn, within
from .latent import LatentRows
from .layers import build_layer
from .norms import PredictedNorm
from .tensors import check_range

__all__ = ["CompressedAttention", "PackedAttention"]


class CompressedAttention(nn.Module):
    """Self-attention whose query-key width R and value width V need not be the head dimension.

    It stands in for the attention module of any family: it takes the names each of them is called with, and differs from
    them in three things only. The softmax scale is stored (it belongs to the ORIGINAL head dimension). Rotary pairs are
    chosen per key/value head, by an index into the model's own cos/sin table, so that a reduced key is still a rotated
    key. And keys and values may have different widths, so the cache holds ``K * (R + V)`` numbers per token.
    """

    def __init__(self, spec: dict, config, layer_idx: int | None, names: tuple[str, ...] = ()):
        super().__init__()
        check_attention(spec)
        self.config, self.layer_idx = config, layer_idx
        self.names = names  # of what is passed by place behind the hidden states
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
        self.one_latent = self.qkv_proj is not None and self.latent_keys  # cached once, as keys; values are empty
        self.q_norm = self.k_norm = None  # adopted from the dense module by `build` where the family has them
        self.sinks = nn.Parameter(torch.empty(self.heads)) if spec.get("sinks") else None
        over = spec.get("norm_over", "head")
        self.norms_all_heads = over == "all heads" and not spec.get("predicted_norms")
        if spec.get("predicted_norms"):
            self.q_norm, self.k_norm = (PredictedNorm(n, self.qk_dim, over) for n in (self.heads, self.kv_heads))
        if spec.get("selected_pairs"):
            # Row p of head k says which rotary frequency pair p turns with; `rotary_dim / 2` means "does not turn".
            pairs = torch.arange(self.qk_dim // 2, dtype=torch.int32).clamp(max=self.rotary_dim // 2)
            self.register_buffer("rotary_pairs", pairs.repeat(self.kv_heads, 1))
        else:
            self.rotary_pairs = None

    def check_indices(self, name: str) -> None:
        """Raise :class:`ValueError` where a pair turns with a frequency that there is not."""
        if self.rotary_pairs is not None:
            check_range(self.rotary_pairs, self.rotary_dim // 2 + 1, f"{name}.rotary_pairs")

    def forward(self, hidden_states, *args, **kwargs):
        return self._forward(hidden_states, **dict(zip(self.names, args, strict=False)), **kwargs)

    def _forward(self, hidden_states, *, residual=None, past_key_values=None, layer_past=None, **kwargs):
        past = past_key_values if past_key_values is not None else layer_past
        output, weights = self._mixed(hidden_states, past, **kwargs)
        output = self._sent(output)
        return (output if residual is None else output + residual), weights

    def _sent(self, mixed):
        """What the output projection makes of values that were mixed."""
        output = mixed if self.o_proj is None else self.o_proj(mixed)
        if self.training and self.output_dropout:
            output = nn.functional.dropout(output, self.output_dropout)
        return output

    def _mixed(
        self,
        hidden_states,
        past,  # not `cache`: transformers passes one of pages by this name, for the attention function
        *,
        position_embeddings=None,
        attention_mask=None,
        alibi=None,
        position_bias=None,
        **kwargs,
    ):
        """Values as attention mixes them, (B, T, H V), and its weights."""
        B, T, _ = hidden_states.shape
        if not self.vo_dim:
            return self._nothing(hidden_states, past), None
        query, key, value = self._project(hidden_states)
        query = self._normalised(query, self.q_norm).transpose(1, 2)  # (B, H, T, R)
        key = key[:, None] if self.latent_keys else self._keys(key)  # (B, 1, T, latent) or (B, K, T, R)
        if self.rotary_base is not None:
            position_embeddings = angles_at(kwargs["position_ids"], self.rotary_base, self.rotary_dim)
        if self.rotary_dim:
            query, key = self._rotate(query, key, *position_embeddings)
        value = value[:, None] if self.latent_values else self._values(value)

        if past is not None:
            key, value = self._cached(past, key, value)
        if self.one_latent:
            value = key
        decodes = past is not None and T == 1
        latent = decodes and (self.latent_keys or self.latent_values)
        latent = latent and (attention_mask is None or torch.is_tensor(attention_mask))  # flex attention's mask is none
        # Flash attention's mask says which tokens are there, (B, S).
        if latent and attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = attention_mask[:, None, None, -key.shape[2] :].bool()
        if self.adds_alibi and alibi is not None:
            attention_mask = add_alibi(alibi, attention_mask, B, self.heads, query.dtype)
        if position_bias is not None:
            attention_mask = add_bias(position_bias, attention_mask, key.shape[2], query.dtype)
        if self.window:
            attention_mask = within(self.window, attention_mask, T, key.shape[2], query.device)

        if latent:
            output, weights = self._attend_latent(query, key, value, attention_mask)
        else:
            key = self._keys(self.k_proj.up(key[:, 0])) if self.latent_keys else key
            value = self._values(self.v_proj.up(value[:, 0])) if self.latent_values else value
            if "cache" in kwargs:
                query, key, value = self._as_dense(query, key, value)
            elif not decodes:  # one token at a time there is no T x S matrix to avoid, and padding would copy the cache
                query, key, value = self._evened(query, key, value)
            # vLLM looks for this call by these names, and puts its own attention in its place.
            attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
            output, weights = attention(
                self,
                query,
                key,
                value,
                attention_mask,
                scaling=self.scaling,
                dropout=self.attention_dropout if self.training else 0.0,
                **self._attending(),
                **kwargs,
            )
            output = output.reshape(B, T, self.heads, -1)[..., : self.vo_dim]
        return output.reshape(B, T, self.heads * self.vo_dim), weights

    def _cached(self, past, key, value):
        """Keys and values of all tokens. A static cache has as many heads of values as of keys, so there heads that stand
        beside a latent are one."""
        if self.latent_keys == self.latent_values or not getattr(past, "is_compileable", False):
            return past.update(key, value, self.layer_idx)
        key, value = (x.transpose(1, 2).flatten(2)[:, None] for x in (key, value))
        key, value = past.update(key, value, self.layer_idx)
        if self.latent_keys:
            return key, self._values(value[:, 0])
        return key[:, 0].unflatten(-1, (self.kv_heads, -1)).transpose(1, 2), value

    def _nothing(self, hidden_states, past):
        """Of no heads. The cache learns how many tokens there were: some models ask the first layer."""
        nothing = hidden_states[..., :0]
        if past is not None:
            past.update(nothing[:, None], nothing[:, None], self.layer_idx)
        return nothing

    def _project(self, x):
        """Queries; keys and values or, where those are cached, their latents; all (B, T, width)."""
        if self.qkv_proj is None:
            key = self.k_proj.down(x) if self.latent_keys else self.k_proj(x)
            value = self.v_proj.down(x) if self.latent_values else self.v_proj(x)
            return self.q_proj(x), key, value
        if not self.latent_values:
            return self.qkv_proj(x).split(self.widths, -1)
        z = self.qkv_proj.down(x)
        query, key, _ = self.qkv_proj.up(z).split(self.widths, -1)
        return (query, z, z[..., :0]) if self.one_latent else (query, key, z)

    def _keys(self, x):
        return self._normalised(x, self.k_norm).transpose(1, 2)  # (B, K, T, R)

    def _normalised(self, x, norm):
        """(B, T, heads, R)"""
        if norm is not None and self.norms_all_heads:
            x = norm(x)
        x = x.view(*x.shape[:2], -1, self.qk_dim)
        return x if norm is None or self.norms_all_heads else norm(x)

    def _values(self, x):
        return x.view(*x.shape[:2], self.kv_heads, self.vo_dim).transpose(1, 2)  # (B, K, T, V)

    def _attend_latent(self, query, key, value, mask):
        """One new token against a cache of latents, which are never expanded (the absorbed form of latent attention).

        Scores: ``q^T B_k c = (B_k^T q)^T c``; a key bias adds the same number to all scores of a query and drops out of
        the softmax (not beside a sink, which is no token's; keys of families with sinks rotate and are not cached so).
        Outputs: attention is averaged over latents first, then expanded (LatentLLM Eq. 18).
        """
        B, H, G = query.shape[0], self.heads, self.num_key_value_groups
        if self.latent_keys:
            up = self.k_proj.up_matrix(query).view(self.kv_heads, self.qk_dim, -1)
            up = up.repeat_interleave(G, 0)  # (H, R, latent)
            scores = torch.einsum("bhr,hrl->bhl", query[:, :, 0], up) @ key[:, 0].transpose(-1, -2)  # (B, H, S)
        else:
            grouped = query.view(B, self.kv_heads, G, self.qk_dim)
            scores = (grouped @ key.transpose(-1, -2)).view(B, H, -1)
        weights = shares(masked(scores[:, :, None] * self.scaling, mask, self.softcap), self.sinks)[:, :, 0]
        weights = weights.to(query.dtype)
        if self.latent_values:
            mixed = weights @ value[:, 0]  # (B, H, latent)
            up = self.v_proj.up_matrix(query).view(self.kv_heads, self.vo_dim, -1).repeat_interleave(G, 0)
            output = torch.einsum("bhl,hvl->bhv", mixed, up)
            if (bias := self.v_proj.shift()) is not None:
                bias = bias.view(self.kv_heads, self.vo_dim).repeat_interleave(G, 0)
                output = output + (bias if self.sinks is None else weights.sum(-1, keepdim=True) * bias)
        else:
            output = (weights.view(B, self.kv_heads, G, -1) @ value).view(B, H, self.vo_dim)
        return output[:, None], weights[:, :, None]

    def _rotate(self, query, key, cos, sin):
        """Rotary embedding, Hugging Face's half layout: dimension p turns together with dimension p + P."""
        half = self.rotary_dim // 2
        once = slice(None, None, 2) if self.interleaved_table else slice(half)
        cos, sin = cos[..., once], sin[..., once]  # (B, T, half); the stored tables say all angles twice
        if self.rotary_pairs is None:  # all pairs in place, then the dimensions that never turn
            cos, sin = cos[:, None], sin[:, None]
            return turn(query, cos, sin, half), turn(key, cos, sin, half)
        still = (*cos.shape[:-1], 1)
        index = self.rotary_pairs.long()
        cos = torch.cat([cos, cos.new_ones(still)], -1)[:, :, index].transpose(1, 2)  # (B, K, T, P)
        sin = torch.cat([sin, sin.new_zeros(still)], -1)[:, :, index].transpose(1, 2)
        half = self.qk_dim // 2
        groups = query.unflatten(1, (self.kv_heads, -1))  # the queries of a group turn as their key
        query = turn(groups, cos[:, :, None], sin[:, :, None], half).flatten(1, 2)
        return query, turn(key, cos, sin, half)

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
                f"continuous batching has pages for {heads} heads of keys and values by the config, and this attention has "
                f"{self.kv_heads}; use generate, or vLLM"
            )
        return (nn.functional.pad(x, (0, width - x.shape[-1])) for x in states)

    def _attending(self) -> dict:
        """Options of attention that the family has."""
        options = {"softcap": self.softcap, "sliding_window": self.sliding_window, "s_aux": self.sinks}
        return {name: value for name, value in options.items() if value is not None}


class PackedAttention(CompressedAttention):
    """Over sequences that stand one behind the other, without a batch dimension: images of any size in Qwen-VL's towers."""

    def _forward(self, hidden_states, *, cu_seqlens, position_embeddings, **_):
        together, mixed = of_one_length(cu_seqlens), []
        for rows in together:
            tables = tuple(table[rows] for table in position_embeddings)
            mixed.append(self._mixed(hidden_states[rows], None, position_embeddings=tables)[0].flatten(0, 1))
        return self._sent(torch.cat(mixed)[torch.cat([rows.flatten() for rows in together]).argsort()])
