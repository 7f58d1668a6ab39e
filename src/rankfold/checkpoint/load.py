"""Loading what :mod:`.run` wrote."""

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .._utils.empty import empty_weights
from ..architectures import copied_config
from ..errors import CheckpointError, OptionError, RankfoldError, UnsupportedModelError, first_line
from ..models.auto_classes import auto_class
from ..models.devices import resolve_device, resolve_dtype, say_if_slow
from ..models.given import ModelFiles, resolve_model
from ..models.tables import check_tables
from ..models.tokenizer import TokenizerFiles
from ..models.weights import Weights, as_written, check_finite
from ..models.whole import (
    REPORTED,
    check_head,
    check_loaded,
    head_differs,
    read_config,
    read_generation_config,
    read_gguf,
    untie_where_unequal,
)
from ..modules import FORMATS, METHOD_NAMES, RankfoldConfig, attach, current_name, install_described


def load_model(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | dict[str, Any] | None = None,
    max_memory: dict[Any, Any] | None = None,
    offload_folder: str | Path | None = None,
    revision: str | None = None,
) -> PreTrainedModel:
    """Load a model ready to run: compressed by rankfold, dense, or a ``.gguf`` file.

    Args:
        model: hub id (``owner/name``, or ``owner/name@revision``), folder, or ``.gguf`` file.
        dtype: ``auto`` (as stored) or a dtype.
        device: where to put it.
        device_map: in place of ``device``, for a model larger than one: where its layers go, as ``from_pretrained`` of
            transformers has it.
        max_memory: what each device may hold, with ``device_map="auto"``.
        offload_folder: where on the disk the rest goes.
        revision: of a hub id: branch, tag or commit.

    Raises:
        OptionError: a revision of what is no hub id, or two of them; a device with a device map; a map of a ``.gguf``
            file.
        CheckpointError: it cannot be read, or does not hold what its config describes.
        NumericsError: a weight is NaN or infinite (named).
    """
    files, where, wanted = resolve_model(model, revision), resolve_device(device), resolve_dtype(dtype)
    spread = {"device_map": device_map, "max_memory": max_memory, "offload_folder": offload_folder}
    spread = {name: value for name, value in spread.items() if value is not None}
    if spread and device != "auto":
        raise OptionError(f"{', '.join(spread)} with device {device!r}; give one of them")
    if spread and files.weights is None:
        raise OptionError(f"{model} is a GGUF file, which is read as a whole; leave {', '.join(spread)} out")
    loaded = load_files(files, wanted, str(model), spread)
    if not spread:
        nn.Module.to(loaded, where)  # whose types a decorator of transformers hides
        if wanted is None:
            say_if_slow(loaded.dtype, where)
    return loaded


def load_files(
    files: ModelFiles, dtype: torch.dtype | None, name: str, spread: dict[str, Any] | None = None
) -> PreTrainedModel:
    """Load what :func:`rankfold.models.given.resolve_model` found.

    Args:
        name: what was asked for.
        spread: arguments of ``from_pretrained`` for where its layers go; on the CPU by default.
    """
    wanted = dtype or "auto"
    path, weights = files
    loaded = _read_folder(path, weights, wanted, name, spread or {}) if weights else read_gguf(path, wanted)
    check_finite(loaded.state_dict())
    return loaded.eval()


def _read_folder(
    folder: Path, weights: Weights, dtype: torch.dtype | str, name: str, spread: dict[str, Any]
) -> PreTrainedModel:
    read_generation_config(folder)
    config = read_config(folder)
    try:
        weights.check_config(config)
        if known := is_known(config):  # before anything is as large as the config says
            with torch.device("meta"):
                empty = empty_model(config)
            match_names(weights, empty, config)
            weights.check_fits(empty)
            check_tables(empty)
        auto: Any = auto_class(config)  # whose types do not know that what is found can be reported
        loaded, info = auto.from_pretrained(folder, dtype=dtype, use_safetensors=True, **spread, **REPORTED)
    except RankfoldError:
        raise
    except ImportError as error:
        raise UnsupportedModelError(
            f"{name} needs a package that is not installed ({first_line(error)}); install it, "
            "or start from the dense model"
        ) from error
    except Exception as error:  # transformers, safetensors and json raise many types for a damaged checkpoint
        raise CheckpointError(f"{name} cannot be loaded: {first_line(error)}; copy or make it again") from error
    compressed = isinstance(getattr(loaded.config, "quantization_config", None), RankfoldConfig)
    check_loaded(info, loaded, folder, only_described=compressed)
    if not known and match_names(weights, loaded, config):  # a quantiser may have names of its own for its tensors
        weights.check_fits(loaded)
    if compressed:
        check_head(head_differs(loaded), folder)
    else:
        untie_where_unequal(loaded, name)
    return loaded


def is_known(config) -> bool:
    """Tell whether the structure is one that :func:`empty_model` builds, and no quantiser's or a later version's."""
    found = facts_of(config)
    return described(config) is None or (found.get("quant_method") in METHOD_NAMES and found.get("format") in FORMATS)


def match_names(weights: Weights, model: PreTrainedModel, config) -> bool:
    """Match names as :meth:`~rankfold.models.weights.Weights.match` does; those of earlier formats are known."""
    return weights.match(model, functools.partial(current_name, written=facts_of(config).get("format")))


def described(config) -> RankfoldConfig | dict | None:
    """Return the description of what was compressed; ``None`` for a stock model."""
    return getattr(config, "quantization_config", None)


def facts_of(config) -> dict[str, Any]:
    """Return the same as it is written; empty for a stock model."""
    found = described(config) or {}
    return found if isinstance(found, dict) else found.to_dict()


def attention_of(config) -> dict[str, Any]:
    """Return how each part of a model computes attention: some parts have none of the others' ways."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    nested = {name: attention_of(part) for name, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **nested}


def empty_model(config, attention: dict[str, Any] | None = None, dtype=None) -> PreTrainedModel:
    """Return the compressed structure a config describes, on the meta device, of its own dtype or another."""
    found = described(config)
    plain = copied_config(config)
    plain.__dict__.pop("quantization_config", None)
    with empty_weights():
        model = auto_class(plain).from_config(
            plain, dtype=dtype or config.dtype, attn_implementation=attention, trust_remote_code=False
        )
    if found is not None:
        install_described(model, found if isinstance(found, RankfoldConfig) else RankfoldConfig(**found))
    return model.eval()


def assemble(source, config, blocks: dict[str, Tensor]) -> PreTrainedModel:
    """Return a compressed model in memory: the source's outer tensors around the given block tensors."""
    model = empty_model(config, attention_of(source.model.config))
    outer = {name: tensor.clone() for name, tensor in source.outer_state().items()}  # the caller may hold the source
    state = outer | {name: as_written(name, tensor.cpu(), source.dtype) for name, tensor in blocks.items()}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights(recompute_mapping=False)  # bases that blocks share too, which are in no mapping of the family
    if hasattr(source.model, "generation_config"):  # encoders have none
        model.generation_config = copy.deepcopy(source.model.generation_config)
    if described(config) is not None:
        attach(model, described(config))
    return model.to(source.device)


def load_tokenizer(model: str | Path):
    """Load the tokenizer of a model, named as for :func:`load_model`.

    Raises:
        CheckpointError: there is none.
    """
    return TokenizerFiles.beside(resolve_model(model).path).load()


def load_processor(model: str | Path):
    """Load the processor of a model of images and text, named as for :func:`load_model`.

    Raises:
        CheckpointError: there is none.
        OptionError: it needs a package that is not installed.
    """
    return TokenizerFiles.beside(resolve_model(model).path).load_processor()
