"""What the caller gave as a model: a hub id, a folder, a file or a model in memory; decided here for all commands."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from .._utils.reporting import asking_hub
from ..architectures import Architecture, Part, part_of
from ..errors import CheckpointError, UnsupportedModelError
from ..modules import METHOD_NAME, METHOD_NAMES
from .auto_classes import auto_class
from .folders import check_file, check_folder, raw_config
from .hub import locate, repository_of
from .listing import MERGED, Listing, check_listing
from .signs import SAVED, check_filled, check_names, check_numbers, kind_of
from .weights import Weights, is_known

# Quantiser -> config of transformers that undoes it.
DEQUANTISES = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}


class ModelFiles(NamedTuple):
    """Where a model lies."""

    path: Path  # a folder, or a ``.gguf`` file
    weights: Weights | None  # of a folder: the headers of its shards have been read


def resolve_model(model: str | Path, revision: str | None = None) -> ModelFiles:
    """Find a model, dense or compressed, that transformers reads.

    Args:
        model: hub id, folder or file.
        revision: of a hub id: branch, tag or commit.

    Raises:
        CheckpointError: it is something else, or a part is not there.
        UnsupportedModelError: it is quantised and its config does not say so, wrapped, or carries an adapter.
    """
    try:
        path = locate(str(model), revision)
    except OSError as error:  # a name that no file can have
        raise CheckpointError(f"no model at {str(model)[:60]!r}: {error.strerror}") from error
    is_local = Path(model).expanduser().exists()
    if not is_local and not (path.is_dir() and Listing.of_folder(path).is_whole):
        _check_repository(str(model), revision)
    if not path.is_dir():
        check_file(path)
        return ModelFiles(path, None)
    check_folder(path)
    config, weights = raw_config(path), Weights(path)
    if "quantization" in config:
        raise UnsupportedModelError(f"{path} is a quantised model of MLX; start from the dense model")
    _check_method(config, path)
    check_names(list(weights.places), str(path))
    if not config.get("quantization_config"):
        check_numbers({name: place.kind for name, place in weights.places.items()}, str(path))
        check_filled({name: place.shape for name, place in weights.places.items()}, str(path))
    return ModelFiles(path, weights)


def _check_repository(name: str, revision: str | None) -> None:
    """Say what a repository of the hub is, of which no config and weights came."""
    from huggingface_hub import HfApi

    repository, wanted = repository_of(name, revision)
    name = f"{repository}@{wanted}" if wanted else repository
    what = f"{name!r} is not complete in the hub's cache, and the hub cannot be asked"
    with asking_hub(repository, what, "check the connection, or download it elsewhere and give the folder"):
        files = HfApi().list_repo_files(repository, revision=wanted)
    check_listing(Listing(name, frozenset(files), is_on_hub=True))


def _check_method(config: dict, folder: Path) -> None:
    """Refuse a quantiser that transformers does not have: with a warning it would read codes as weights."""
    found = config.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, dict) else None
    known = {*METHOD_NAMES, *AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"}  # the last has a suffix in the mapping
    if method and method not in known:
        raise UnsupportedModelError(
            f"{folder} is quantised ({str(method)[:60]}), which transformers does not read; start from the dense model"
        )


def check_given(model: nn.Module, name: str | None) -> Part:
    """The part of this name; :class:`UnsupportedModelError`, with what to do, unless the model is a plain dense one."""
    if hasattr(model, "_orig_mod"):
        raise UnsupportedModelError("the model is compiled; give the model that was compiled (model._orig_mod)")
    check_plain(model)
    if not isinstance(model, PreTrainedModel):
        held = next((path for path, part in model.named_modules() if isinstance(part, PreTrainedModel)), None)
        give = f"the model in it (model.get_submodule({held!r}))" if held else "a PreTrainedModel, a folder or a hub id"
        raise UnsupportedModelError(f"{type(model).__name__} is not a transformers model; give {give}")
    check_quantised(model.config, type(model).__name__)
    auto_class(model.config, type(model).__name__)
    state = model.state_dict()
    _check_one_device(model, state)
    on_meta = [name for name, tensor in state.items() if tensor.device.type == "meta"]
    if on_meta:
        raise UnsupportedModelError(
            f"{on_meta[0]} and {len(on_meta) - 1} more tensors are on the meta device, without numbers; "
            "load the weights first"
        )
    check_names(list(state), type(model).__name__)
    if not getattr(model.config, "quantization_config", None):
        check_numbers({name: kind_of(tensor) for name, tensor in state.items()}, type(model).__name__)
        check_filled({name: tensor.shape for name, tensor in state.items()}, type(model).__name__)
    part = part_of(model, name)
    check_quantised(model.config, type(model).__name__, part.architecture.blocks)
    if part.architecture.decoder and model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM"
        )
    _check_layers(model, part.architecture)
    return part


def check_plain(model: nn.Module) -> None:
    """Raise :class:`UnsupportedModelError` for a model with adapters, which ``save_pretrained`` writes alone, and for
    one with weights that a quantiser packed in memory, as torchao does without a word in the config."""
    if hasattr(model, "peft_config"):
        merged = "model = model.merge_and_unload()" if hasattr(model, "merge_and_unload") else MERGED
        raise UnsupportedModelError(f"the model carries adapters; merge them first ({merged}) and give the result")
    packed = next((name for name, weight in model.named_parameters() if not is_known(weight)), None)
    if packed and not getattr(model, "is_quantized", False):  # else its config has the quantiser, and its own saving
        kind = type(model.get_parameter(packed)).__name__
        raise UnsupportedModelError(
            f"the model is quantised ({kind}: {packed}); give the model as it was before; "
            "torch.save(model.state_dict(), FILE) keeps the quantised weights"
        )


def check_quantised(config, name: str, blocks: str | None = None) -> None:
    """Raise :class:`UnsupportedModelError` where a config says that the model is compressed or quantised already.

    Args:
        blocks: path of those that are to be compressed; another part of the model may be compressed by rankfold.
            ``None``: it is not known yet, and that is left open.
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
    to_do = "start from the dense model"
    if method in DEQUANTISES:
        to_do += (
            f", or de-quantise it: from_pretrained(..., quantization_config={DEQUANTISES[method]}(dequantize=True)) of "
            f"transformers, and give that model, or what it writes with {SAVED}"
        )
    raise UnsupportedModelError(f"{name} is already compressed or quantised ({method}); {to_do}")


def _check_one_device(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Refuse a model that ``device_map`` has put on several devices or on disk: its hooks move what blocks are sent."""
    mapped = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    found = {str(tensor.device) for tensor in state.values() if not tensor.is_meta}
    if len(mapped) > 1 or len(found) > 1:
        places = sorted(mapped if len(mapped) > 1 else found)
        raise UnsupportedModelError(
            f"the model is spread over {', '.join(places)}; give its folder or hub id, which is read block by block, "
            "or load it without device_map"
        )


def _check_layers(model: nn.Module, architecture: Architecture) -> None:
    """Projections are read as their weight; a layer that computes anything else would be replaced by something else."""
    for name, layer in model.get_submodule(architecture.blocks).named_modules():
        if isinstance(layer, nn.Linear) and (not is_known(layer) or hasattr(layer, "parametrizations")):
            raise UnsupportedModelError(
                f"{architecture.blocks}.{name} is a {type(layer).__name__}, which may compute something else than its "
                "weight says; replace it by nn.Linear"
            )
