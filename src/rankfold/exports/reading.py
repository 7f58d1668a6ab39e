"""What is left of a block, read as one narrower dense block, whether a method replaced its modules or not.

Shape legend: D model width, H query heads, K key/value heads, R query-key width, V value width, N dense head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..architectures import BlockView, Dense, read_linear
from ..errors import UnsupportedModelError, method_option, option
from ..linalg.padding import head_places
from ..modules import CompressedAttention, LatentExperts, PredictedNorm, ShortcutBlock


@dataclass(frozen=True)
class AttentionWeights:
    """An attention, its widths aside as any other."""

    q: Dense  # (H R, D)
    k: Dense  # (K R, D)
    v: Dense  # (K V, D)
    o: Dense  # (D, H V)
    places: Tensor  # (K, R) where the dimensions of each key head belong in a dense one
    scaling: float

    @property
    def kv_heads(self) -> int:
        return len(self.places)

    @property
    def heads(self) -> int:
        return len(self.q.weight) // self.places.shape[1]

    @property
    def values(self) -> int:
        """V."""
        return len(self.v.weight) // self.kv_heads

    def pairs(self, rotary_dim: int) -> frozenset[int]:
        """Rotary frequencies that any head turns by."""
        turning = self.places[self.places < rotary_dim]
        return frozenset((turning % (rotary_dim // 2)).tolist()) if rotary_dim else frozenset()

    @property
    def width(self) -> int:
        """The least width of a head that has all places."""
        return max(int(self.places.max()) + 1, self.values)


def read_heads(view: BlockView, rotary_dim: int) -> AttentionWeights:
    """The attention of a block.

    Args:
        rotary_dim: leading dimensions of a dense head that turn.

    Raises:
        UnsupportedModelError: it is made of something else than matrices, or the stream changes its width in the block.
    """
    if isinstance(view.module, ShortcutBlock):
        raise UnsupportedModelError(
            f"{view.path} changes the width of its stream, which no stock block does; load it with rankfold instead"
        )
    where = view.architecture.attention_of(view.module).path
    module, path = view.module.get_submodule(where), f"{view.path}.{where}"
    if isinstance(module, CompressedAttention):
        if isinstance(module.q_norm, PredictedNorm):
            raise UnsupportedModelError(
                f"{path} has fewer dimensions of queries and keys than its norms are over, and predicts what these "
                "divide by, which no stock model does; serve the folder as it is (docs/serve.md), or compress with "
                f"{method_option('modules', ('mlp', 'vo'))}"
            )
        q, k, v, o = (
            _read(f"{path}.{name}", _member(module, name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )
        if not module.vo_dim:
            return _silent_heads(module, q, k, v, o, rotary_dim)
        places = torch.arange(module.qk_dim).repeat(module.kv_heads, 1)
        if module.rotary_pairs is not None:
            places = head_places(module.rotary_pairs, rotary_dim)
        return AttentionWeights(q, k, v, o, places, module.scaling)
    attention = view.attention
    places = torch.arange(attention.head_dim).repeat(attention.kv_heads, 1)
    return AttentionWeights(*attention.qkv(), attention.output, places, attention.runtime()["scaling"])


def _silent_heads(
    module: CompressedAttention, q: Dense, k: Dense, v: Dense, o: Dense, rotary_dim: int
) -> AttentionWeights:
    """An attention of no width as one of the least there is, whose weights are zero."""
    places = torch.tensor([[0, rotary_dim // 2] if rotary_dim else [0]]).repeat(module.kv_heads, 1)
    width = places.shape[1]

    def rows(dense: Dense, count: int) -> Dense:
        weight, bias = dense.weight, dense.bias
        return Dense(weight.new_zeros(count, weight.shape[1]), None if bias is None else bias.new_zeros(count))

    q, k, v = rows(q, module.heads * width), rows(k, module.kv_heads * width), rows(v, module.kv_heads)
    o = Dense(o.weight.new_zeros(len(o.weight), module.heads), o.bias)
    return AttentionWeights(q, k, v, o, places, module.scaling)


def read_rising(view: BlockView) -> tuple[dict[str, Dense], Dense]:
    """Projections into the hidden units of a block's MLP by path, and the one out of them.

    Raises:
        UnsupportedModelError: they are something else than matrices.
    """
    spec = view.mlp.spec
    paths = [path for path in (spec.gate, spec.up, spec.down) if path]
    *rising, down = (_read(f"{view.path}.{path}", view.module.get_submodule(path)) for path in paths)
    return dict(zip(paths[:-1], rising, strict=True)), down


def check_experts(view: BlockView) -> None:
    """Raise :class:`UnsupportedModelError` where experts are made of something else than matrices."""
    experts = view.experts
    if isinstance(experts.module, LatentExperts):
        _read(f"{view.path}.{experts.spec.path}", experts.module)


def _member(module: CompressedAttention, name: str) -> nn.Module:
    """A projection; queries, keys and values that share a latent have one module."""
    return getattr(module, name) if name == "o_proj" or module.qkv_proj is None else module.qkv_proj


def _read(path: str, module: nn.Module) -> Dense:
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        return read_linear(module)
    raise UnsupportedModelError(
        f"{path} is a {type(module).__name__}, which no stock model has; serve the folder as it is (docs/serve.md), or "
        f"compress with {option('method', 'rankfold')} or modegpt"
    )
