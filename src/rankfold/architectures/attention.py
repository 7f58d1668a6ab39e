"""One reading of an attention's weights, whatever its family calls them and however it stores them.

Shape legend: D model width, H query heads, K key/value heads, N head dimension.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from .linear import Dense, read_linear
from .norms import Norm, read_norm
from .spec import AttentionSpec, ByConfig

# Rotary embeddings whose frequencies are the same for texts of any length.
FIXED_ROTARY = ("default", "linear", "llama3")


def own_frequencies(base: float, rotary_dim: int) -> Tensor:
    """``(rotary_dim / 2,)`` angle per position of each pair, of attention that makes its angles itself."""
    return base ** -(torch.arange(0, rotary_dim, 2).float() / rotary_dim)


def _split_rows(
    count: int, layout: str, heads: int, kv_heads: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Which of the ``count`` rows of a fused projection are q, k and v; see :class:`AttentionSpec` for the layouts."""
    rows = torch.arange(count, device=device)
    head_dim = count // (heads + 2 * kv_heads)
    if layout == "concat":
        q, k, v = rows.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim])
        return q, k, v
    grouped = rows.view(kv_heads, heads // kv_heads + 2, head_dim)
    return grouped[:, :-2].reshape(-1), grouped[:, -2].reshape(-1), grouped[:, -1].reshape(-1)


@dataclass(frozen=True)
class AttentionView:
    """The attention of one block."""

    spec: AttentionSpec
    module: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int  # leading dimensions of a head that rotary embedding turns; 0 without
    config: Any
    block: nn.Module

    @property
    def cached(self) -> int:
        """Numbers cached per token."""
        found = self.spec.cached
        if isinstance(found, tuple):
            return sum(getattr(self.config, field) for field in found)
        if isinstance(found, str):
            keys = getattr(self.module, found, None)
            return 2 * read_linear(keys).weight.shape[0] if keys else 0
        return 2 * self.kv_heads * self.head_dim if found is None else found

    @property
    def reads_others(self) -> bool:
        """Whether it has no keys and values, and reads those of an earlier block."""
        return isinstance(self.spec.cached, str) and self.cached == 0

    @property
    def qkv_modules(self) -> tuple[nn.Module, ...]:
        return tuple(self.module.get_submodule(name) for name in self.spec.qkv)

    @property
    def output_module(self) -> nn.Module:
        """The output projection, also of an attention that has been compressed."""
        return self.block.get_submodule(self.output_path)

    @property
    def output_path(self) -> str:
        """Where the output projection is in the block as it is now."""
        return _output_path(self.block, self.spec)

    def qkv(self) -> tuple[Dense, Dense, Dense]:
        """q ``(H N, D)``, k ``(K N, D)``, v ``(K N, D)``."""
        modules = [read_linear(m) for m in self.qkv_modules]
        q, k, v = (
            modules if len(modules) == 3 else (modules[0].rows(part) for part in self._parts(modules[0].weight, 0))
        )
        order = self._order(q.weight.device)
        return (q, k, v) if order is None else (*self._reordered(q, k, order), v)

    def _parts(self, fused: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Indices of q, k and v along a dimension of the fused projection, or of what it returned."""
        return _split_rows(fused.shape[dim], self.spec.layout, self.heads, self.kv_heads, fused.device)

    def _reordered(self, q: Dense, k: Dense, order: Tensor) -> tuple[Dense, Dense]:
        heads = torch.arange(self.heads, device=order.device)[:, None] * self.head_dim
        return q.rows((heads[: self.heads] + order).flatten()), k.rows((heads[: self.kv_heads] + order).flatten())

    def _order(self, device: torch.device) -> Tensor | None:
        """``(N,)`` dimensions of a head in the order that has the partners of rotary pairs half a rotation apart, which
        all that is computed here takes for granted: a score does not change when queries and keys are reordered alike.
        """
        if self.spec.rope_style == "neox" or not self.rotary_dim:
            return None
        turning, still = torch.arange(self.head_dim, device=device).split(
            [self.rotary_dim, self.head_dim - self.rotary_dim]
        )
        return torch.cat([turning[::2], turning[1::2], still])

    def qkv_rows(self) -> dict[str, tuple[str, Tensor]]:
        """q, k, v -> the layer that holds the projection (``qkv`` where it is fused), and which of its rows are it;
        nothing where they are none such."""
        layers = [read_linear(module).weight for module in self.qkv_modules]
        if not layers:
            return {}
        if len(layers) == 3:
            return {name: (name, torch.arange(len(w), device=w.device)) for name, w in zip("qkv", layers, strict=True)}
        return {name: ("qkv", part) for name, part in zip("qkv", self._parts(layers[0], 0), strict=True)}

    def fused(self, q: Dense, k: Dense, v: Dense) -> list[Dense]:
        """What :attr:`qkv_modules` would hold; the inverse of :meth:`qkv`."""
        if (order := self._order(q.weight.device)) is not None:
            q, k = self._reordered(q, k, order.argsort())
        if len(self.spec.qkv) == 3:
            return [q, k, v]
        weight = torch.cat([part.weight for part in (q, k, v)])
        biases = [part.bias for part in (q, k, v) if part.bias is not None]
        bias = torch.cat(biases) if biases else None
        return [Dense(weight, bias).rows(torch.cat(self._parts(weight, 0)).argsort())]

    def split_states(self, outputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``(B, T, H, N)``, keys and values ``(B, T, K, N)`` from what :attr:`qkv_modules` returned."""
        if len(outputs) == 1:
            outputs = [outputs[0][..., part] for part in self._parts(outputs[0], -1)]
        q, k, v = (o.unflatten(-1, (-1, self.head_dim)) for o in outputs)
        order = self._order(q.device)
        return (q, k, v) if order is None else (q[..., order], k[..., order], v)

    def normalised(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries ``(B, T, H, N)`` and keys ``(B, T, K, N)`` as they go into the rotation."""
        if not self.norms:
            return query, key
        q_norm, k_norm = (getattr(self.module, name) for name in self.norms)
        return (
            q_norm(self.flat_for_norm(query)).view_as(query),
            k_norm(self.flat_for_norm(key)).view_as(key),
        )

    def flat_for_norm(self, x: Tensor) -> Tensor:
        """``(B, T, H, N)`` as the norms see it: ``(B, T, 1, H N)`` where they are over all heads."""
        return x if self.spec.norm_over == "head" else x.flatten(2)[:, :, None]

    @property
    def head_norms(self) -> tuple[Norm, Norm] | Any:
        """The q/k-norms, where there are any whose mean square can be predicted."""
        if not self.norms or self.spec.norm_offset is None:
            return None
        offset = self.spec.norm_offset
        q_norm, k_norm = (read_norm(getattr(self.module, n), offset=offset, is_layernorm=False) for n in self.norms)
        return q_norm, k_norm

    def angles(self, call: dict) -> tuple[Tensor, Tensor]:
        """Cosine and sine, ``(B or 1, T, rotary_dim / 2)`` each, one entry for every pair.

        Args:
            call: what the block is called with: the model's tables, or position numbers.

        Raises:
            UnsupportedModelError: the tables are for several positions a token.
        """
        if self.spec.rotary_base is not None:
            frequencies = own_frequencies(self.spec.rotary_base, self.rotary_dim)
            angles = call["position_ids"][..., None] * frequencies.to(call["position_ids"].device)
            return angles.cos(), angles.sin()
        (cos, sin), pairs = call["position_embeddings"], self.rotary_dim // 2
        if cos.dim() > 3:  # (3, B, T, width): three positions a token, of which the attention takes sections
            raise UnsupportedModelError(
                "this model turns its heads by three positions a token, which is read from transformers 5.20 on; "
                "install transformers>=5.20"
            )
        return (cos[..., ::2], sin[..., ::2]) if self.spec.interleaved_table else (cos[..., :pairs], sin[..., :pairs])

    @property
    def takes_pairs(self) -> bool:
        """Whether a stock model of this family can have narrower heads that turn by some of its rotary frequencies
        only.

        Its config has a width of heads then, all of which turns, and LongRoPE in it gives every pair a frequency of its
        own.
        """
        parameters = getattr(self.config, "rope_parameters", None) or {}  # of layers that differ: by kind of layer
        usual = parameters.get("rope_type") in FIXED_ROTARY and "mrope_section" not in parameters
        whole = self.spec.rotary_base is None and self.rotary_dim == self.head_dim
        spec = self.spec
        special = spec.unsupported_reason or spec.growth or self.norms
        return bool(spec.width and spec.longrope and not special and usual and whole)

    @property
    def output(self) -> Dense:
        """o ``(D, H N)``."""
        return read_linear(self.output_module)

    @property
    def norms(self) -> tuple[str, str] | None:
        """Names of the q/k-norms, where this model really has them."""
        names = self.spec.qk_norm
        return names if names and getattr(self.module, names[0], None) is not None else None

    @property
    def sinks(self) -> Tensor | None:
        """``(H,)`` scores of the attention sinks, where the family has them."""
        if self.spec.sinks is None:
            return None
        return getattr(self.module, "sinks" if hasattr(self.module, "sinks") else self.spec.sinks)

    @property
    def averages(self) -> bool:
        """Whether the shares of the tokens add up to one, so that a constant in all values passes; a sink takes one."""
        return self.spec.sinks is None

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return bool(getattr(self.module, "is_causal", True))

    def runtime(self) -> dict:
        """What a compressed attention must keep of this one, as its description."""

        def setting(name: str, default: Any = None) -> Any:
            value = getattr(self.module, name, getattr(self.config, name, default))
            return value.p if isinstance(value, nn.Dropout) else value

        factor, step = self.growth
        scale = self.spec.scaling
        scale = self.head_dim**-0.5 if scale is None else float(setting(scale) if isinstance(scale, str) else scale)
        return {
            "kind": "packed_attention" if self.spec.packed else "attention",
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "scaling": scale,
            "growth": factor,
            "growth_step": step,
            "rotary_base": self.spec.rotary_base,
            "window": self._window(),
            "alibi": self.spec.position == "alibi",
            "softcap": setting("attn_logit_softcapping"),
            # a layer that says it does not slide may still know the width of the window
            "sliding_window": setting("sliding_window") if getattr(self.module, "is_sliding", True) else None,
            "dropout": setting(self.spec.dropout, 0.0),
            "output_dropout": setting(self.spec.output_dropout, 0.0) if self.spec.output_dropout else 0.0,
            "interleaved_table": self.spec.interleaved_table,
            "adopt": dict(zip(("q_norm", "k_norm"), self.norms, strict=True)) if self.norms else {},
            "norm_over": self.spec.norm_over,
            "causal": self.causal,
            "sinks": self.spec.sinks is not None,
        }

    @property
    def growth(self) -> tuple[float | None, float | None]:
        """By what factor queries grow with their position, and after how many each time."""
        if self.spec.growth is None:
            return None, None
        factor, step = (self.config.rope_parameters.get(field) for field in self.spec.growth)
        return (factor, step) if factor else (None, None)

    def _window(self) -> int | None:
        """How far back this layer sees, where it masks the rest itself."""
        if self.spec.window is None:
            return None
        kind, width = self.spec.window
        return getattr(self.config, width) if getattr(self.module, kind) == "local" else None


def read_attention(spec: AttentionSpec, block: nn.Module, config) -> AttentionView:
    """The attention of a block, compressed or not."""
    if isinstance(spec.position, ByConfig):
        spec = replace(spec, position=spec.position.of(config))
    module, heads = block.get_submodule(spec.path), config.num_attention_heads
    output = block.get_submodule(_output_path(block, spec))
    # What has become latent has no weight, but as every layer of the runtime the width of its input.
    sent = getattr(output, "in_features", None) or read_linear(output).weight.shape[1]
    head_dim = sent // heads if spec.is_there else 0
    kv_heads, rotary_dim = _kv_heads(spec, module, config) or heads, _rotary_dim(spec, module, config, head_dim)
    return AttentionView(spec, module, heads, kv_heads, head_dim, rotary_dim, config, block)


def _output_path(block: nn.Module, spec: AttentionSpec) -> str:
    """Of the output projection; a compressed attention has one name for it, whatever its family calls it."""
    if spec.outside:
        return spec.output
    name = "o_proj" if getattr(block.get_submodule(spec.path), "o_proj", None) is not None else spec.output
    return f"{spec.path}.{name}"


def _kv_heads(spec: AttentionSpec, module: nn.Module, config) -> int | None:
    """``None``: as many as query heads. A compressed attention has one name for them, whatever its family uses."""
    if spec.kv_heads is None or hasattr(module, "kv_heads"):
        return getattr(module, "kv_heads", None)
    owner, name = spec.kv_heads.split(".")
    return getattr(module if owner == "module" else config, name)


def _rotary_dim(spec: AttentionSpec, module: nn.Module, config, head_dim: int) -> int:
    if spec.position != "rope" or getattr(config, "alibi", False):
        return 0
    name = spec.applies_rope.of(config) if isinstance(spec.applies_rope, ByConfig) else spec.applies_rope
    if name and not getattr(module, name, True):
        return 0
    rotary = getattr(config, "rotary_dim", None) if spec.rotary_base else getattr(module, "rotary_ndims", None)
    if rotary is None:
        factor = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
        rotary = int(head_dim * factor)
    return rotary
