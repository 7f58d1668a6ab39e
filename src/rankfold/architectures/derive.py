"""The spec of a family that nobody wrote down, read off one block: names and shapes.

It is a guess until numbers confirm it on the model at hand (:mod:`rankfold.compression.validate_spec`); nothing uses it
before.
"""

import re
from typing import TYPE_CHECKING, Literal

from torch import nn

from ..errors import UnsupportedModelError
from .linear import read_linear
from .spec import Architecture, AttentionSpec, MLPSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AFFIX = re.compile(r"^(to_|in_|self_)|_?(proj|projection|lin|linear|layer|weight)$|_")
SEPARATE = {"q": ("q", "wq", "query"), "k": ("k", "wk", "key"), "v": ("v", "wv", "value")}
FUSED = ("qkv", "wqkv", "querykeyvalue", "cattn", "wpack")
SCALES = ("scaling", "scale", "softmax_scale", "norm_factor", "inv_norm_factor")
DROPOUTS = ("attention_dropout", "attn_dropout", "dropout")
OUTPUT_DROPOUTS = ("residual_dropout", "resid_dropout", "hidden_dropout")
WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
Layers = dict[str, nn.Module]


def derive(model: "PreTrainedModel") -> Architecture:
    """What the block of a model seems to be.

    Args:
        model: weights may be on the meta device.

    Raises:
        UnsupportedModelError: a block has no such parts; the message says which.
    """
    config = model.config.get_text_config()
    path, blocks = _blocks(model, config)
    block = blocks[0]
    name, module = _attention(block, config)
    return Architecture(
        model_type=config.model_type,
        blocks=path,
        attention=_attention_spec(name, module, model, config),
        mlp=_mlp({n: layer for n, layer in linear_layers(block).items() if not n.startswith(f"{name}.")}, config),
        derived=True,
    )


def linear_layers(module: nn.Module) -> Layers:
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
    }


def shape(layer: nn.Module) -> tuple[int, int]:
    """``(out, in)``"""
    out, wide = read_linear(layer).weight.shape
    return out, wide


def _because(config, why: str) -> str:
    return (
        f"model type {config.model_type!r} has no spec, and none can be read off its blocks: {why}; see "
        "docs/add-an-architecture.md, and `rankfold models` for the families there are"
    )


def _blocks(model: nn.Module, config) -> tuple[str, nn.ModuleList]:
    """The list of as many modules as the config has layers, all of one kind, that holds the most weights."""
    wanted = getattr(config, "num_hidden_layers", None)
    lists = {
        name: found
        for name, found in model.named_modules()
        if isinstance(found, nn.ModuleList) and len(found) == wanted and len({type(m) for m in found}) == 1
    }
    if not lists:
        raise UnsupportedModelError(_because(config, f"there is no list of {wanted} blocks of one kind"))
    return max(lists.items(), key=lambda item: sum(p.numel() for p in item[1].parameters()))


def _attention(block: nn.Module, config) -> tuple[str, nn.Module]:
    found = [(name, m) for name, m in block.named_modules() if name and hasattr(m, "layer_idx") and linear_layers(m)]
    if not found:
        raise UnsupportedModelError(
            _because(config, "no module of a block is an attention with the number of its layer")
        )
    return found[-1]  # the innermost: some wrap it


def _attention_spec(path: str, module: nn.Module, model: nn.Module, config) -> AttentionSpec:
    layers = linear_layers(module)
    plain = {name: AFFIX.sub("", AFFIX.sub("", name.lower())) for name in layers}
    parts = [name for names in SEPARATE.values() for name in [n for n in layers if plain[n] in names][:1]]
    fused = [name for name in layers if plain[name] in FUSED]
    if len(parts) == len(SEPARATE):
        qkv = tuple(parts)
    elif len(fused) == 1:
        qkv = (fused[0],)
    else:
        raise UnsupportedModelError(
            _because(config, f"its attention projects by {', '.join(layers)}, which are not queries, keys and values")
        )
    others = [name for name in layers if name not in qkv]
    if len(others) != 1:
        raise UnsupportedModelError(
            _because(
                config,
                f"its attention has {', '.join(others) or 'nothing'} in addition to {', '.join(qkv)}, not one output",
            )
        )
    scaling = next((name for name in SCALES if getattr(module, name, getattr(config, name, None)) is not None), None)
    if scaling is None:
        raise UnsupportedModelError(_because(config, "its attention has no attribute with the scale of its scores"))
    rotary = any(type(m).__name__.endswith("RotaryEmbedding") for m in model.modules())
    norms, over = _norms(module, layers[qkv[0]])
    return AttentionSpec(
        path=path,
        qkv=qkv,
        output=others[0],
        kv_heads="config.num_key_value_heads" if getattr(config, "num_key_value_heads", None) else None,
        width=None,  # nothing here shows that the class asks the config; heads of a stock model keep theirs
        position="rope" if rotary else "none",
        sinks="sinks" if isinstance(getattr(module, "sinks", None), nn.Parameter) else None,
        qk_norm=norms,
        norm_over=over,
        norm_offset=None if norms else 0.0,  # their numbers do not show what they do
        scaling=scaling,
        dropout=next((name for name in DROPOUTS if hasattr(module, name)), DROPOUTS[0]),
        output_dropout=next((name for name in OUTPUT_DROPOUTS if hasattr(module, name)), None),
    )


def _norms(attention: nn.Module, query: nn.Module) -> tuple[tuple[str, str] | None, Literal["head", "all heads"]]:
    """Norms of queries and keys, and what they are over."""
    names = [name for name, m in attention.named_children() if "norm" in name.lower() and name.lower()[0] in "qk"]
    if len(names) != 2:
        return None, "head"
    k_norm, q_norm = sorted(names)
    width = next((p.shape[-1] for p in attention.get_submodule(q_norm).parameters()), None)
    return (q_norm, k_norm), "all heads" if width == shape(query)[0] else "head"


def _mlp(layers: Layers, config) -> MLPSpec | None:
    """``None`` where it is not one projection down and one or two up to it: a mixture of experts."""
    width = config.hidden_size
    down = [name for name, layer in layers.items() if shape(layer)[0] == width and shape(layer)[1] != width]
    if len(down) != 1:
        return None
    hidden = shape(layers[down[0]])[1]
    rising = [name for name, layer in layers.items() if shape(layer) == (hidden, width)]
    both = [name for name, layer in layers.items() if shape(layer) == (2 * hidden, width)]
    if len(layers) != 1 + len(rising) + len(both):
        return None
    field = next((name for name in WIDTHS if getattr(config, name, None) == hidden), None)
    if len(both) == 1 and not rising:
        return MLPSpec(down=down[0], up=both[0], fused_gate=True, width=field)
    if both or len(rising) not in (1, 2):
        return None
    gates = [name for name in rising if "gate" in name] or rising[:1]
    if len(rising) == 1:
        return MLPSpec(down=down[0], up=rising[0], width=field)
    return MLPSpec(down=down[0], up=next(name for name in rising if name != gates[0]), gate=gates[0], width=field)
