"""Attention that caches latents instead of heads.

Shape legend: B batch, T new tokens, S cached tokens, H query heads, K key/value heads, G = H / K, R query-key width, V
value width.
"""

import torch

from .attention import CompressedAttention
from .kernels import attend_one


class LatentAttention(CompressedAttention):
    """Attention whose cache holds the latents of keys, of values, or one latent of both.

    One new token attends to the latents themselves, which are never expanded (the absorbed form of latent attention).
    Scores: ``q^T B_k c = (B_k^T q)^T c``; a key bias adds the same number to all scores of a query and drops out of the
    softmax (not beside a sink, which is no token's; keys of families with sinks rotate and are not cached so).
    Outputs: attention is averaged over latents first, then expanded (LatentLLM Eq. 18).
    """

    def mix(self, hidden_states, past, *, position_embeddings=None, **kwargs):
        if past is None:
            return super().mix(hidden_states, past, position_embeddings=position_embeddings, **kwargs)
        query, key, value = self._latents(hidden_states)
        key = key if self.latent_keys else self._keys(key)
        query, key = self._turned(query, key, position_embeddings, kwargs)
        key = key[:, None] if self.latent_keys else key.transpose(1, 2)  # (B, 1, T, latent) or (B, K, T, R)
        value = value[:, None] if self.latent_values else self._values(value).transpose(1, 2)
        key, value = self._cached(past, key, value)
        mask = kwargs.get("attention_mask")
        if query.shape[2] == 1 and (mask is None or torch.is_tensor(mask)):  # flex attention's mask is none
            return self._attend_latents(query, key, value, mask, kwargs)
        if self.latent_keys:
            key = self._keys(self.k_proj.up(key[:, 0])).transpose(1, 2)
        if self.latent_values:
            value = self._values(self.v_proj.up(value[:, 0])).transpose(1, 2)
        return self._attend(query, key, value, **kwargs)

    def _latents(self, x):
        """Project to queries, and to what is cached of keys and values, (B, T, width) each."""
        if self.qkv_proj is None:
            key = self.k_proj.down(x) if self.latent_keys else self.k_proj(x)
            return self.q_proj(x), key, self.v_proj.down(x) if self.latent_values else self.v_proj(x)
        z = self.qkv_proj.down(x)
        query, key, value = self.qkv_proj.up(z).split(self.widths, -1)
        if self.latent_keys and self.latent_values:  # one latent, cached once
            return query, z, z[..., :0]
        return query, z if self.latent_keys else key, z if self.latent_values else value

    def _cached(self, past, key, value):
        """Return keys and values of all tokens.

        A static cache has as many heads of values as of keys, so there heads that stand beside a latent are one.
        """
        one = self.qkv_proj is not None and self.latent_keys and self.latent_values
        if self.latent_keys == self.latent_values or not getattr(past, "is_compileable", False):
            key, value = past.update(key, value, self.layer_idx)
            return key, key if one else value
        key, value = (x.transpose(1, 2).flatten(2)[:, None] for x in (key, value))
        key, value = past.update(key, value, self.layer_idx)
        if self.latent_keys:
            return key, self._values(value[:, 0]).transpose(1, 2)
        return key[:, 0].unflatten(-1, (self.kv_heads, -1)).transpose(1, 2), value

    def _attend_latents(self, query, key, value, mask, kwargs):
        if mask is not None and mask.dim() == 2:  # flash attention's mask marks which tokens are there, (B, S)
            kwargs = kwargs | {"attention_mask": mask[:, None, None, -key.shape[2] :].bool()}
        mask = self._masked(query, key.shape[2], **kwargs)
        if self.latent_keys:
            up = self.k_proj.up_matrix(query).view(self.kv_heads, self.qk_dim, -1)  # (K, R, latent)
            query = _times(query[:, :, 0], up)[:, :, None]
        mixed, weights = attend_one(query, key, value, mask, self.scaling, self.softcap, self._sinks)
        if self.latent_values:
            up = self.v_proj.up_matrix(mixed).view(self.kv_heads, self.vo_dim, -1)  # (K, V, latent)
            mixed = _times(mixed, up.transpose(1, 2))
            if (bias := self.v_proj.shift()) is not None:
                bias = bias.view(self.kv_heads, 1, self.vo_dim).expand(-1, self.num_key_value_groups, -1).flatten(0, 1)
                mixed = mixed + (bias if self._sinks is None else weights.sum(-1, keepdim=True) * bias)
        gives_weights = self.config._attn_implementation == "eager" or self._is_asked(kwargs)
        return mixed.reshape(mixed.shape[0], 1, -1), weights[:, :, None] if gives_weights else None


def _times(x, matrices):
    """(B, H, m) times the (K, m, n) of the groups; (B, H, n)."""
    grouped = x.unflatten(1, (len(matrices), -1)).transpose(0, 1)  # (K, B, G, m)
    return torch.bmm(grouped.flatten(1, 2), matrices).unflatten(1, grouped.shape[1:3]).transpose(0, 1).flatten(1, 2)
