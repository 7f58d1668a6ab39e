"""The spec of a family that nobody wrote down, read off its blocks: names and shapes.

It is a guess until numbers confirm it on the model at hand (:mod:`rankfold.compression.validate_spec`); nothing uses it
before. Attention of which not all is read stays as it is, and so does what some blocks have in its place.
"""

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from ..errors import UnsupportedModelError
from .linear import read_linear
from .spec import LLAMA_4_GROWTH, Architecture, AttentionSpec, ExpertsSpec, MLPSpec, left_dense, mixer, part_at

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AFFIX = re.compile(r"^(to_|in_|self_|linear_)|_?(proj|projection|lin|linear|layer|weight)$|_")
SEPARATE = {"q": ("q", "wq", "query"), "k": ("k", "wk", "key"), "v": ("v", "wv", "value")}
FUSED = ("qkv", "wqkv", "querykeyvalue", "cattn", "wpack")
OUTPUTS = ("o", "out", "wo", "output", "dense", "c")
SCALES = ("scaling", "scale", "softmax_scale", "norm_factor", "inv_norm_factor")
DROPOUTS = ("attention_dropout", "attn_dropout", "dropout")
OUTPUT_DROPOUTS = ("residual_dropout", "resid_dropout", "hidden_dropout")
WIDTHS = ("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
ACTIVE = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
GROUPS = ("n_group", "topk_group")
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
    name, module = _attention(blocks, config)
    attention = _attention_spec(name, module, model, blocks, config)
    mixers = _mixers(blocks, name, config)
    if any((spec.path, spec.output) == (attention.path, attention.output) for spec in mixers):  # no telling them apart
        attention, mixers = left_dense(attention, "some of its blocks lack queries, keys or values"), ()
    places = (name, *(spec.path for spec in mixers))
    experts = [_experts(block, places, config) for block in blocks]
    plain = next((block for block, found in zip(blocks, experts, strict=True) if found is None), None)
    found = Architecture(
        model_type=config.model_type,
        blocks=path,
        attention=attention,
        mlp=None if plain is None else _mlp(_outside(plain, places), config),
        experts=next(filter(None, experts), None),
        mixers=mixers,
        images_after_blocks=bool(getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", ())),
        derived=True,
    )
    if found.attention.unsupported_reason and found.mlp is None and found.experts is None:
        raise UnsupportedModelError(_because(config, f"{found.attention.unsupported_reason}, and no MLP is found"))
    return found


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
    """The list of as many modules as the config has layers that holds the most weights."""
    wanted = getattr(config, "num_hidden_layers", None)
    lists = {
        name: found
        for name, found in model.named_modules()
        if isinstance(found, nn.ModuleList) and len(found) == wanted
    }
    if not lists:
        raise UnsupportedModelError(_because(config, "no list of blocks is as long as num_hidden_layers"))
    return max(lists.items(), key=lambda item: sum(p.numel() for p in item[1].parameters()))


def _numbered(block: nn.Module) -> list[str]:
    """Paths of what knows the number of its layer: it keeps something in the cache."""
    return [name for name, m in block.named_modules() if name and hasattr(m, "layer_idx") and linear_layers(m)]


def _attention(blocks: nn.ModuleList, config) -> tuple[str, nn.Module]:
    """The first that has queries, keys and values; where there is none, the first that might."""
    places = [(block, names) for block in blocks if (names := _numbered(block))]
    if not places:
        raise UnsupportedModelError(
            _because(config, "no module of a block is an attention with the number of its layer")
        )
    # The innermost comes first: some wrap it.
    found = [(name, block.get_submodule(name)) for block, names in places for name in reversed(names)]
    block, (outermost, *_) = places[0]
    return next((item for item in found if _qkv(linear_layers(item[1]))), (outermost, block.get_submodule(outermost)))


def _mixers(blocks: nn.ModuleList, attention: str, config) -> tuple[AttentionSpec, ...]:
    """What blocks without such a module have in its place, perhaps at the same path."""
    found: dict[str, nn.Module] = {}
    has_qkv = any(_has_qkv(block, attention) for block in blocks)
    for block in blocks:
        names = _numbered(block) or [attention]
        there = part_at(block, names[0]) is not None
        if there and (attention not in names or (has_qkv and not _has_qkv(block, attention))):
            found.setdefault(names[0], block.get_submodule(names[0]))
    return tuple(
        replace(mixer(name, f"it is {type(module).__name__}"), output=_one_output(linear_layers(module), (), config))
        for name, module in found.items()
    )


def _has_qkv(block: nn.Module, path: str) -> bool:
    return bool(_qkv(linear_layers(part_at(block, path) or nn.Identity())))


def _outside(block: nn.Module, places: tuple[str, ...]) -> Layers:
    """Linear layers that are in none of these modules."""
    inside = tuple(f"{name}." for name in places)
    return {name: layer for name, layer in linear_layers(block).items() if not name.startswith(inside)}


def _experts(block: nn.Module, places: tuple[str, ...], config) -> ExpertsSpec | None:
    """``None`` where there are none, or none of those that transformers runs by kernels of its own."""
    found: list[tuple[str, Any]] = [item for item in block.named_modules() if getattr(item[1], "has_gate", False)]
    active = next((name for name in ACTIVE if hasattr(config, name)), None)
    if len(found) != 1 or active is None:
        return None
    ((path, module),) = found
    experts = len(module.down_proj)
    count = next((name for name in COUNTS if _told(config, name) == experts), None)
    if count is None:
        return None
    # Neither the router nor a gate on the MLP beside the experts is a part of that MLP.
    beside = {n: m for n, m in _outside(block, places).items() if shape(m)[0] not in (1, experts)}
    shared = _mlp(beside, config)  # whose width may come from the same field
    return ExpertsSpec(
        path=path,
        transposed=module.is_transposed,
        interleaved=not module.is_concatenated,
        shared=replace(shared, width=None) if shared else None,
        width=None if shared else _field(module.down_proj.shape[1 if module.is_transposed else 2], config),
        count=count,
        active=active,
        groups=GROUPS if all(getattr(config, name, None) for name in GROUPS) else None,
    )


def _field(width: int, config) -> str | None:
    """Field of the config with so many hidden units."""
    return next((name for name in WIDTHS if _told(config, name) == width), None)


def _told(config, name: str) -> Any:
    """Value of a field of the config; ``None`` where there is none for all layers alike."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # of transformers: layers differ in it
        return None


def _attention_spec(path: str, module: nn.Module, model: nn.Module, blocks: nn.ModuleList, config) -> AttentionSpec:
    layers = linear_layers(module)
    qkv = _qkv(layers)
    output = _one_output(layers, qkv, config)
    kv_heads = "config.num_key_value_heads" if _told(config, "num_key_value_heads") else None
    if not qkv:
        why = f"its attention projects by {', '.join(layers)}, which are not queries, keys and values"
        return left_dense(AttentionSpec(path, output, (), kv_heads=kv_heads), why)
    scaling = next((name for name in SCALES if getattr(module, name, getattr(config, name, None)) is not None), None)
    # Of all blocks: some have an indexer that the first lacks, and it chooses among more tokens than a proof runs.
    there = [part_at(block, path) for block in blocks if part_at(block, f"{path}.{output}") is not None]
    every = dict.fromkeys(name for attention in there for name in linear_layers(attention))
    others = [name for name in every if name not in (*qkv, output)]
    if scaling is None and not others:
        raise UnsupportedModelError(_because(config, "its attention has no attribute with the scale of its scores"))
    rotary, own = (any(type(m).__name__.endswith("RotaryEmbedding") for m in x.modules()) for x in (model, module))
    rope = getattr(config, "rope_parameters", None) or {}
    norms, over = _norms(module, layers[qkv[0]])
    spec = AttentionSpec(
        path=path,
        qkv=qkv,
        output=output,
        kv_heads=kv_heads,
        width=None,  # nothing here shows that the class asks the config; heads of a stock model keep theirs
        position="rope" if rotary else "none",
        rotary_base=rope.get("rope_theta") if own else None,
        growth=LLAMA_4_GROWTH if LLAMA_4_GROWTH[0] in rope else None,
        sinks="sinks" if isinstance(getattr(module, "sinks", None), nn.Parameter) else None,
        qk_norm=norms,
        norm_over=over,
        norm_offset=None if norms else 0.0,  # their numbers do not show what they do
        scaling=scaling,
        dropout=next((name for name in DROPOUTS if hasattr(module, name)), DROPOUTS[0]),
        output_dropout=next((name for name in OUTPUT_DROPOUTS if hasattr(module, name)), None),
    )
    return left_dense(spec, f"its attention has {', '.join(others)} too") if others else spec


def _plain(name: str) -> str:
    return AFFIX.sub("", AFFIX.sub("", name.lower()))


def _qkv(layers: Layers) -> tuple[str, ...]:
    """The three projections, or the one that is fused; nothing where there are none such."""
    parts = [name for names in SEPARATE.values() for name in [n for n in layers if _plain(n) in names][:1]]
    fused = [name for name in layers if _plain(name) in FUSED]
    if len(parts) == len(SEPARATE):
        return tuple(parts)
    return tuple(fused) if len(fused) == 1 else ()


def _one_output(layers: Layers, qkv: tuple[str, ...], config) -> str:
    """The one other layer, or of several the one with such a name."""
    others = [name for name in layers if name not in qkv]
    named = others if len(others) == 1 else [name for name in others if _plain(name) in OUTPUTS]
    if len(named) != 1:
        besides = f" in addition to {', '.join(qkv)}" if qkv else ""
        raise UnsupportedModelError(
            _because(config, f"its attention has {', '.join(others) or 'nothing'}{besides}, not one output")
        )
    return named[0]


def _norms(attention: nn.Module, query: nn.Module) -> tuple[tuple[str, str] | None, Literal["head", "all heads"]]:
    """Norms of queries and keys, and what they are over."""
    names = [name for name, m in attention.named_children() if "norm" in name.lower() and name.lower()[0] in "qk"]
    if len(names) != 2:
        return None, "head"
    k_norm, q_norm = sorted(names)
    width = next((p.shape[-1] for p in attention.get_submodule(q_norm).parameters()), None)
    return (q_norm, k_norm), "all heads" if width == shape(query)[0] else "head"


def _mlp(layers: Layers, config) -> MLPSpec | None:
    """The one of these layers, or the largest of one module; ``None`` where there is none: a mixture of experts."""
    groups: dict[str, Layers] = {}
    for name, layer in layers.items():
        groups.setdefault(name.rpartition(".")[0], {})[name] = layer
    by_size = sorted(groups.values(), key=lambda group: -sum(map(math.prod, map(shape, group.values()))))
    return next(filter(None, (_one_mlp(group, config) for group in (layers, *by_size))), None)


def _one_mlp(layers: Layers, config) -> MLPSpec | None:
    """``None`` where it is not one projection down and one or two up to it."""
    width = config.hidden_size
    down = [name for name, layer in layers.items() if shape(layer)[0] == width and shape(layer)[1] != width]
    if len(down) != 1:
        return None
    hidden = shape(layers[down[0]])[1]
    rising = [name for name, layer in layers.items() if shape(layer) == (hidden, width)]
    both = [name for name, layer in layers.items() if shape(layer) == (2 * hidden, width)]
    if len(layers) != 1 + len(rising) + len(both):
        return None
    field = _field(hidden, config)
    if len(both) == 1 and not rising:
        return MLPSpec(down=down[0], up=both[0], fused_gate=True, width=field)
    if both or len(rising) not in (1, 2):
        return None
    gates = [name for name in rising if "gate" in name] or rising[:1]
    if len(rising) == 1:
        return MLPSpec(down=down[0], up=rising[0], width=field)
    return MLPSpec(down=down[0], up=next(name for name in rising if name != gates[0]), gate=gates[0], width=field)
