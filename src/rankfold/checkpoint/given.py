"""Whether a model that the caller holds in memory is one that can be compressed."""

import torch
from torch import nn
from transformers import PreTrainedModel

from ..architectures import Architecture, Part, part_of
from ..errors import UnsupportedModelError
from ..modules import METHOD_NAME
from .classes import auto_class

__all__ = ["check_given", "check_quantised", "check_tied"]

KNOWN = ("torch", "transformers")  # whose linear layers compute what their weight says


def check_given(model: nn.Module, name: str | None) -> Part:
    """The part of this name; :class:`UnsupportedModelError`, saying what to do, unless the model is a plain dense one."""
    if hasattr(model, "_orig_mod"):
        raise UnsupportedModelError("the model is compiled; give the model that was compiled (model._orig_mod)")
    if hasattr(model, "peft_config"):
        raise UnsupportedModelError(
            "the model carries adapters; merge them first (model = model.merge_and_unload()) and give the result"
        )
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model; give a PreTrainedModel, a folder or a hub id"
        )
    check_quantised(model.config, type(model).__name__)
    auto_class(model.config, type(model).__name__)
    on_meta = [name for name, tensor in model.state_dict().items() if tensor.device.type == "meta"]
    if on_meta:
        raise UnsupportedModelError(
            f"{on_meta[0]} and {len(on_meta) - 1} more tensors are on the meta device, without numbers; load the weights first"
        )
    part = part_of(model, name)
    check_quantised(model.config, type(model).__name__, part.architecture.blocks)
    if part.architecture.decoder and model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM"
        )
    _check_layers(model, part.architecture)
    return part


def check_quantised(config, name: str, blocks: str | None = None) -> None:
    """Raise :class:`UnsupportedModelError` where a config says that the model is compressed or quantised already.

    Args:
        config: of the model.
        name: of the model, for the message.
        blocks: path of those that are to be compressed; another part of the model may be compressed by rankfold. ``None``:
            it is not known yet, and that is left open.
    """
    done = getattr(config, "quantization_config", None)
    if not done:
        return
    done = done if isinstance(done, dict) else done.to_dict() if hasattr(done, "to_dict") else vars(done)
    method = done.get("quant_method") or "quantization_config"
    method = str(getattr(method, "value", method)).partition(" ")[0]  # ours says more
    ours = method == METHOD_NAME.partition(" ")[0]
    if ours and (blocks is None or not any(path.startswith(f"{blocks}.") for path in done["modules"])):
        return
    raise UnsupportedModelError(f"{name} is already compressed or quantised ({method}); start from the dense model")


def check_tied(model: nn.Module) -> None:
    """A caller's model is not changed, so a config that ties what is not tied is refused."""
    state = model.state_dict()
    for name, other in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if not torch.equal(state[name], state[other]):
            raise UnsupportedModelError(
                f"{name} differs from {other}, and the model's config ties them; set config.tie_word_embeddings=False and "
                "save and load the model, so that both are kept"
            )


def _check_layers(model: nn.Module, architecture: Architecture) -> None:
    """Projections are read as their weight; a layer that computes something else would be replaced by something else."""
    for name, layer in model.get_submodule(architecture.blocks).named_modules():
        own = type(layer).__module__.partition(".")[0] not in KNOWN
        if isinstance(layer, nn.Linear) and (own or hasattr(layer, "parametrizations")):
            raise UnsupportedModelError(
                f"{architecture.blocks}.{name} is a {type(layer).__name__}, which may compute something else than its weight "
                "says; replace it by nn.Linear"
            )
