"""The stock model that a compressed one fits into, padded as little as its class allows."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from .._utils.empty import empty_weights
from .._utils.present import present
from ..architectures import Architecture, AttentionView, BlockView, check_stock, copied_config
from ..checkpoint.load import empty_model, facts_of
from ..errors import UnsupportedModelError
from ..models.dense_model import DenseModel
from ..models.weights import tied_names
from ..modules import install
from .reading import check_experts, read_heads, read_rising
from .rotary import places_of, turning_by


@dataclass(frozen=True)
class StockModel:
    """A stock model: its config, and the layers that are narrower than it says, for classes that can have them."""

    config: Any
    architecture: Architecture
    layers: dict[str, dict]  # path -> description of a linear layer
    # (N,) where each place of a dense head is in a head of this model, N: nowhere. None: where it was.
    places: Tensor | None = None

    def empty(self, dtype=None) -> PreTrainedModel:
        """The model, parameters on the meta device."""
        model = empty_model(self.config, dtype=dtype)
        with empty_weights():
            install(model, self.layers)
        return model.eval()

    def view(self, model: PreTrainedModel, index: int) -> BlockView:
        """A block of :meth:`empty`."""
        block = model.get_submodule(self.architecture.path_of(index))
        return BlockView(self.architecture, index, block, self.config.get_text_config())


@dataclass(frozen=True)
class _Sizes:
    """What a block needs of its config."""

    heads: int
    kv_heads: int
    width: int
    rotary_dim: int
    pairs: frozenset[int]  # rotary frequencies that any head has
    values: int  # width of values
    units: dict[str, int]  # field of the config -> hidden units
    biases: frozenset[str]  # fields of the config that give layers a bias


def stock_form(source: DenseModel) -> StockModel:
    """The narrowest stock model of its own family that all blocks of a compressed one fit into.

    Heads and widths of heads stay dense where the config of the family cannot say otherwise, or a rotary embedding
    needs all places of a head: where all heads turn by the same few frequencies it does not. All MLPs become as wide as
    the widest one.

    Raises:
        UnsupportedModelError: a block is made of something else than matrices, the family is not a known one, or
            another part of the model was compressed before.
    """
    if "before" in facts_of(source.model.config):
        raise UnsupportedModelError(
            f"{source.name} has more than one compressed part, and a stock model is made of one; serve the folder as "
            "it is (docs/serve.md)"
        )
    check_stock(source.config, "serve the folder as it is (docs/serve.md)")
    dense = StockModel(plain(source.model.config), source.architecture, {})
    empty = dense.empty()
    sizes = [_sizes(source.block(index), dense.view(empty, index)) for index in range(len(source))]
    config = plain(source.model.config)
    text, full = config.get_text_config(), dense.view(empty, 0).attention
    pairs = _few_pairs(full, sizes)
    if full.spec.width and not full.spec.unsupported_reason:
        _set_heads(text, full, sizes, pairs)
    for field in frozenset().union(*(size.units for size in sizes)):
        setattr(text, field, max(1, *(size.units.get(field, 0) for size in sizes)))
    for field in frozenset().union(*(size.biases for size in sizes)):
        setattr(text, field, True)
    if pairs is None:
        return dataclasses.replace(dense, config=config)
    text.rope_parameters = turning_by(present(source.inv_freq(0)).cpu()[pairs], text)
    return dataclasses.replace(dense, config=config, places=places_of(pairs, full.head_dim))


def plain(config):
    """A copy of a config that describes no compressed modules."""
    copy = copied_config(config)
    for name in ("quantization_config", "auto_map"):
        copy.__dict__.pop(name, None)
    return copy


def parameters(model: PreTrainedModel) -> int:
    """How many numbers a model has, tied ones counted once; an empty model has two tensors of them."""
    tied = tied_names(model)
    return sum(p.numel() for name, p in model.named_parameters() if name not in tied)


def _sizes(view: BlockView, dense: BlockView) -> _Sizes:
    attention, rising, down, units = dense.attention, {}, None, {}
    if view.mlp:
        rising, down = read_rising(view)
        units[view.mlp.spec.width] = down.weight.shape[1]
    if view.experts:
        check_experts(view)
        units[view.experts.spec.width] = view.experts.hidden
    biases = {"mlp_bias": _biased(*rising.values(), *([down] if down else []))}
    shape = (attention.heads, attention.kv_heads, attention.head_dim)  # of one that stays as it is
    pairs, values = frozenset(), 0
    if not attention.spec.unsupported_reason:
        heads = read_heads(view, attention.rotary_dim)
        shape = (heads.heads, heads.kv_heads, heads.width)
        pairs, values = heads.pairs(attention.rotary_dim), heads.values
        biases["attention_bias"] = _biased(heads.q, heads.k, heads.v, heads.o)
    added = frozenset(field for field, there in biases.items() if there and getattr(dense.config, field, None) is False)
    units.pop(None, None)  # the class fixes their number
    return _Sizes(*shape, attention.rotary_dim, pairs, values, units, added)


def _biased(*layers) -> bool:
    return any(layer.bias is not None for layer in layers)


def _few_pairs(full: AttentionView, sizes: list[_Sizes]) -> list[int] | None:
    """Rotary frequencies that are enough for all heads, ascending; ``None`` where the class wants all of them."""
    used = frozenset().union(*(size.pairs for size in sizes))
    count = max(len(used), *((size.values + 1) // 2 for size in sizes))
    alike = all(size.rotary_dim == full.head_dim for size in sizes)
    if not (full.takes_pairs and alike and 2 * count < full.head_dim):
        return None
    others = [pair for pair in range(full.head_dim // 2) if pair not in used]
    return sorted([*used, *others[: count - len(used)]])


def _set_heads(text, full: AttentionView, sizes: list[_Sizes], pairs: list[int] | None) -> None:
    """Say in a config how many heads there are and how wide they are; a rotary embedding turns as many dimensions as
    before, or by ``pairs`` only."""
    rotary_dim = max(size.rotary_dim for size in sizes)  # of layers that rotate
    width = max(rotary_dim, *(size.width for size in sizes)) if pairs is None else 2 * len(pairs)
    if 0 < rotary_dim < full.head_dim and width < full.head_dim:  # the config has a share, which the class rounds down
        width = next(w for w in range(width, full.head_dim + 1) if int(rotary_dim / w * w) == rotary_dim)
        text.rope_parameters = text.rope_parameters | {"partial_rotary_factor": rotary_dim / width}
    heads, kv_heads = max(size.heads for size in sizes), max(size.kv_heads for size in sizes)
    if (heads, kv_heads, width) != (full.heads, full.kv_heads, full.head_dim):  # or the config is left alone
        text.num_attention_heads, text.num_key_value_heads = heads, kv_heads
        setattr(text, present(full.spec.width), width)
