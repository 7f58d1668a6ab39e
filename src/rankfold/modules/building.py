"""From the descriptions in a config to the modules of a compressed model."""

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .attention import CompressedAttention, PackedAttention
from .descriptions import check_description
from .experts import LatentExperts, narrow_experts
from .latent import LatentLinear
from .latent_attention import LatentAttention
from .layers import LAYERS, build_layer
from .shortcuts import ShortcutBlock

ATTENTIONS = {"attention": CompressedAttention, "packed_attention": PackedAttention}


def build(spec: dict, dense: nn.Module | None = None, config=None) -> nn.Module:
    """The module a description stands for; weights are uninitialised.

    Args:
        spec: ``{"kind": ..., sizes}`` as found in ``quantization_config["modules"]``.
        dense: the module it replaces, for kinds that take something over from it.
        config: the model's (text) config, for kinds that attend.

    Raises:
        ValueError: an unknown kind, sizes that are no positive integers, what is no module of this kind, or an
            attention that could not run; ``dense`` is missing.
    """
    check_description(spec, (*LAYERS, *ATTENTIONS, "experts", "latent_experts", "shortcut_block"))
    if isinstance(dense, nn.Embedding):
        raise ValueError(f"a {spec['kind']} module stands for no embedding")
    if spec["kind"] in LAYERS:
        return build_layer(spec)
    if dense is None:
        raise ValueError(f"a {spec['kind']} module takes something over from the module that it replaces; give that")
    if spec["kind"] in ATTENTIONS:
        return _attention(spec, dense, config)
    return {"shortcut_block": ShortcutBlock, "experts": narrow_experts, "latent_experts": LatentExperts}[spec["kind"]](
        spec, dense
    )


def _attention(spec: dict, dense: nn.Module, config) -> nn.Module:
    names = getattr(dense, "names", None) or tuple(inspect.signature(type(dense).forward).parameters)[2:]
    index = getattr(dense, "layer_idx", getattr(dense, "layer_id", None))  # GPT-Neo's name for it; an encoder has none
    kind = LatentAttention if spec.get("latent_cache") and spec["kind"] == "attention" else ATTENTIONS[spec["kind"]]
    module = kind(spec, config, index, names)
    for name, theirs in spec.get("adopt", {}).items():
        if name not in ("q_norm", "k_norm"):
            raise ValueError(f"cannot adopt {name!r} into a compressed attention; allowed: q_norm, k_norm")
        norm = getattr(dense, name if isinstance(dense, CompressedAttention) else theirs)
        if not isinstance(norm, nn.Module):
            raise ValueError(f"cannot adopt {theirs!r} as {name}: it is {type(norm).__name__}, not a norm")
        setattr(module, name, norm)
    return module


def install(model: Any, modules: dict[str, dict]) -> None:
    """Swap the named submodules of ``model`` (a ``PreTrainedModel``) for the ones described, in place.

    A model may have fewer blocks, as of ``from_pretrained(folder, num_hidden_layers=2)``: the first ones.

    Raises:
        ValueError: a path that is not in the model, or a description :func:`build` refuses.
    """
    for path, spec in sorted(modules.items()):  # a block before what is in it
        if any(_is_beyond(model, place) for place in _places(model, path)):
            if spec["kind"] == "shortcut_block":
                raise ValueError(
                    f"the model has too few blocks for {path!r}: only the last block of this compression returns the "
                    "stream to its full width; load all blocks, without num_hidden_layers"
                )
            continue
        place = _place(model, path)
        parent, _, name = place.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, name, build(spec, getattr(owner, name), _config_of(model, place)))
        if spec["kind"] == "shortcut_block":  # it adds what two of its parts make, so these belong on one device
            model._no_split_modules = {*(model._no_split_modules or ()), ShortcutBlock.__name__}
        owner._is_hf_initialized = True  # some families' weight init reaches into children by names that are gone now
    if any(spec["kind"] in ATTENTIONS for spec in modules.values()):
        model._get_static_cache_init_shape = _unknown  # the config does not have the widths; the first states do
    _tie(model)
    _record(model)


def tied_weights(root: nn.Module) -> list[str]:
    """Return the names, inside of ``root``, of bases that an earlier block stores."""
    return [f"{name}.A.weight" for name, module in _with_basis(root)]


def _with_basis(root: nn.Module) -> list[tuple[str, LatentLinear]]:
    return [(n, m) for n, m in root.named_modules() if isinstance(m, LatentLinear) and m.basis]


def _tie(model: Any) -> None:
    """Have transformers tie bases that several blocks share where it loads, and leave copies out where it saves."""
    module: Any
    for name, module in _with_basis(model):
        place = _place(model, module.basis)
        owner = model.get_submodule(place)
        if not isinstance(owner, LatentLinear) or owner.basis or owner.A.weight.shape != module.A.weight.shape:
            raise ValueError(f"{name!r} cannot have the basis of {place!r}, which stores none of its shape")
        model.all_tied_weights_keys[f"{name}.A.weight"] = f"{place}.A.weight"
        module._tied_weights_keys = {"A.weight": f"{place}.A.weight"}
    if ties := {name: model.all_tied_weights_keys[name] for name in tied_weights(model)}:
        model.get_expanded_tied_weights_keys = _Ties(model, ties)


class _Ties:
    """The method ``get_expanded_tied_weights_keys`` of one model with bases that blocks share.

    ``tie_weights()`` asks it, also where transformers did not load the weights: a config has no word for such ties. It
    is pickled with the model, as a function made here is not.
    """

    def __init__(self, model: Any, ties: dict[str, str]):
        self.model, self.ties = model, ties

    def __call__(self, *args, **kwargs) -> dict[str, str]:
        return type(self.model).get_expanded_tied_weights_keys(self.model, *args, **kwargs) | self.ties


def _unknown():
    return None


def _record(model: nn.Module) -> None:
    """Have transformers collect attention weights and hidden states: it looks for the family's own classes."""
    for part in model.modules():
        recorded = getattr(type(part), "_can_record_outputs", None) or {}
        for name, ours in {"attentions": CompressedAttention, "hidden_states": ShortcutBlock}.items():
            classes = recorded.get(name, ours)
            classes = classes if isinstance(classes, list) else [classes]
            if ours not in classes:
                recorded[name] = [*classes, ours]


def _config_of(model: Any, place: str):
    """The config of the part of a model that a module is in: a vision tower has its own."""
    found, module = model.config, model
    for name in place.split(".")[:-1]:
        module = getattr(module, name)
        found = module.config if isinstance(module, PreTrainedModel) else found
    return found.get_text_config()


def _place(model: Any, path: str) -> str:
    """Where a module is in this model.

    Paths are those of the class that was compressed, with a head or without one, and a model without one has no
    prefix in them.
    """
    for place in _places(model, path):
        parent, _, name = place.rpartition(".")
        try:
            owner = model.get_submodule(parent)
        except AttributeError:
            continue
        if hasattr(owner, name):
            return place
    written, name = model.config.architectures or (), type(model).__name__
    instead = f", a {name}; load it as {' or '.join(written)}" if written and name not in written else ""
    raise ValueError(f"the checkpoint describes a module {path!r} that this model does not have{instead}")


def _places(model: Any, path: str) -> tuple[str, ...]:
    prefix, language = f"{getattr(model, 'base_model_prefix', '')}.", path.replace("language_model.", "", 1)
    return path, path.removeprefix(prefix), prefix + path, language


def _is_beyond(model: nn.Module, path: str) -> bool:
    """Whether a path leads through a list of blocks that is too short for it."""
    module: Any = model
    for name in path.split("."):
        if isinstance(module, nn.ModuleList) and name.isdigit() and int(name) >= len(module):
            return True
        module = getattr(module, name, None)
    return False
