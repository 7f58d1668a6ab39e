"""A block in RMS form, written in any coordinates of the residual stream.

Shape legend: D width of the dense stream, r width in some coordinates, O rows of a reader, F inputs of a writer.
"""

from dataclasses import dataclass

from torch import Tensor

from ....architectures import AttentionView, BlockView, Dense, Norm, read_linear
from ....linalg.norm_folding import centre_columns, fold_norm
from ....modules import CompressedAttention, PredictedNorm


@dataclass(frozen=True)
class Converted:
    """The linear layers of a block whose norms are plain RMSNorms.

    Scales and shifts are in the readers, means out of the writers. Exactly the same function as the block of a stream
    whose mean is subtracted, where that block has LayerNorms.
    """

    attention: AttentionView  # of the dense block
    norms: tuple[Norm, Norm]
    readers: dict[str, tuple[Dense, Norm]]  # q, k, v, and by path what rises into the MLP
    writers: dict[str, Dense]  # o, and by path the down projection
    qk_dim: int
    vo_dim: int
    pairs: Tensor | None = None  # (K, qk_dim / 2) kept rotary pairs
    head_norms: dict[str, Tensor] | None = None  # of queries and keys that lost dimensions, by name

    @classmethod
    def of(cls, view: BlockView, attention: AttentionView) -> "Converted":
        """A block with its norms, which must add both its halves to the stream as they are.

        Args:
            view: dense, or with smaller layers in attention and MLP.
            attention: of the dense block.
        """
        first, second, now = *view.norms, view.attention.module
        if isinstance(now, CompressedAttention):
            qkv, widths = [read_linear(part) for part in (now.q_proj, now.k_proj, now.v_proj)], (now.qk_dim, now.vo_dim)
            pairs, norms = now.rotary_pairs, _predicted(now)
        else:
            qkv, widths, pairs, norms = attention.qkv(), (attention.head_dim, attention.head_dim), None, None
        readers = {name: (layer, first) for name, layer in zip("qkv", qkv, strict=True)}
        readers |= {path: (layer, second) for path, layer in view.mlp.rising().items()}
        writers = {"o": view.attention.output, view.mlp.spec.down: view.mlp.down}
        return cls(attention, (first, second), readers, writers, *widths, pairs, norms)

    @property
    def is_layernorm(self) -> bool:
        """Whether the block's norms subtract means."""
        return self.norms[0].is_layernorm

    def reader(self, name: str, basis: Tensor | None) -> Dense:
        """``(O, r)`` on a stream in the coordinates ``basis``, ``(D, r)`` orthonormal fp64; ``None``: the model's."""
        layer, norm = self.readers[name]
        W, b = fold_norm(layer.weight.double(), layer.bias, norm.scale, norm.shift)
        return _stored(W if basis is None else W @ basis, b, layer)

    def writer(self, name: str, basis: Tensor | None) -> Dense:
        """``(r, F)`` into a stream in the coordinates ``basis``."""
        layer = self.writers[name]
        W, b = layer.weight.double(), None if layer.bias is None else layer.bias.double()
        if self.is_layernorm:
            W, b = centre_columns(W), None if b is None else centre_columns(b)
        if basis is not None:
            W, b = basis.T @ W, None if b is None else basis.T @ b
        return _stored(W, b, layer)

    def entry(self, basis: Tensor) -> Tensor:
        """``(r, D)``: from the model's own coordinates to ``basis``, means subtracted where the norms do."""
        return centre_columns(basis).T if self.is_layernorm else basis.T


def _predicted(attention: CompressedAttention) -> dict[str, Tensor] | None:
    """Tensors of q/k-norms that are not the dense model's any more."""
    found = {}
    for name in ("q_norm", "k_norm"):
        if isinstance(norm := getattr(attention, name), PredictedNorm):
            found |= {f"{name}.{key}": tensor for key, tensor in norm.state_dict().items()}
    return found or None


def _stored(W: Tensor, b: Tensor | None, like: Dense) -> Dense:
    dtype = like.weight.dtype
    return Dense(W.to(dtype), None if b is None else b.to(dtype))
