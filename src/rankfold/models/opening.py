"""Opening a dense model: from the hub, a folder, a GGUF file, or in memory."""

import copy
import logging
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from .._utils.empty import empty_weights
from .._utils.files import own_name
from .._utils.memory import has_room
from .._utils.reporting import reporting
from ..architectures import part_of
from ..calibration.offload import resolve_offload
from ..errors import CheckpointError, OptionError, option
from .agreement import check_agrees
from .auto_classes import auto_class
from .dense_model import DenseModel
from .devices import DTYPES, is_on, resolve_device, resolve_dtype
from .gguf_config import check_biases, check_size, gguf_config
from .gguf_reader import parsed_once
from .gguf_weights import stream_gguf
from .given import check_given, check_quantised, resolve_model
from .hub import commit_of, full_name, repository_of
from .loaded import commit_of_loaded
from .processors import Processors
from .tables import check_tables
from .tokenizer import TokenizerFiles
from .weights import Weights, as_computed, fill_outer, is_held, move_outer
from .whole import check_answers, check_unused, read_config, read_generation_config, read_gguf, read_whole, untie

log = logging.getLogger(__name__)

WIDENED = 8  # how much larger a GGUF file of 4 bits a number is in fp32


def open_model(
    model: "str | Path | nn.Module",
    *,
    dtype: str = "auto",
    device: str = "auto",
    tokenizer: Any = None,
    component: str | None = None,
    revision: str | None = None,
    offload: str | Path | None = None,
) -> DenseModel:
    """Open a model for compression.

    Args:
        model: hub id (``owner/name``, ``owner/name@revision``, or a word that the hub knows, like ``gpt2``), local
            folder, local ``.gguf`` file, or a transformers model already in memory, which is not changed.
        dtype: ``float32``, ``bfloat16`` or ``float16``: what the result is written in; ``auto`` is as the checkpoint
            stores it, and ``bfloat16`` for a ``.gguf`` file, whose few bits fp32 would only make longer.
        device: ``cpu``, ``cuda`` or ``mps``: where blocks run, one at a time. A model in memory need not be there.
            ``auto`` is that of a model in memory, or else the fastest there is.
        tokenizer: overrides the one beside the weights.
        component: ``language``, ``vision`` or ``projector`` of a model that has several; by default the one that writes
            text, or else the only one.
        revision: of a hub id: branch, tag or commit.
        offload: keep the hidden states of the calibration samples off the device: ``cpu``, host memory next to an
            accelerator, or a folder on a disk. What is computed is the same.

    Raises:
        CheckpointError, UnsupportedModelError, OptionError: with one line saying what to do.
    """
    wanted, of_sums = resolve_dtype(dtype), torch.get_default_dtype()
    if of_sums is not torch.float32:  # of the whole process, so it is the caller's to change
        raise OptionError(f"the default dtype of PyTorch is {of_sums}; set it to torch.float32 with set_default_dtype")
    if isinstance(model, nn.Module):
        source = _open_given(model, wanted, device, tokenizer, component, revision)
        source.offload = resolve_offload(offload, source.device)
        return source
    where = resolve_device(device)
    kept, found = resolve_offload(offload, where), resolve_model(model, revision)
    path, is_here = found.path, Path(str(model)).expanduser().exists()
    name = own_name(path) if is_here else repository_of(str(model))[0]  # no local paths in results
    if found.weights is None:
        read = _read_gguf(path, where, wanted, component)
    else:
        read = _read_folder(path, found.weights, where, wanted, component)
    network, storage_dtype, weights, size, stack = read
    processors = Processors(name, TokenizerFiles.beside(path), tokenizer)
    source = DenseModel(network, name, where, storage_dtype, weights, processors, size, stack, commit_of(path))
    source.offload = kept
    if not len(source):
        raise CheckpointError(f"{name} has no blocks by its config; correct num_hidden_layers in config.json")
    return source


def _open_given(model: nn.Module, dtype: torch.dtype | None, device: str, tokenizer, component, revision) -> DenseModel:
    """As :func:`open_model`, for a model that the caller holds."""
    part = check_given(model, component)
    model = cast("PreTrainedModel", model)  # nothing else passes
    if part.architecture.decoder:
        check_answers(model.config, type(model).__name__)
    check_agrees(model)
    if revision is not None:
        raise OptionError(f"a revision is of a hub id, and the model is in memory, got {revision!r}; leave it out")
    where = model.device if device == "auto" else resolve_device(device)
    blocks = model.get_submodule(part.architecture.blocks)
    within = {id(weight) for weight in blocks.parameters()}
    outer = {name: weight for name, weight in model.named_parameters() if id(weight) not in within}
    uneven = [name for name, weight in outer.items() if not is_held(name, weight, model.dtype)]
    if uneven or not is_on(next(model.parameters()), where):
        held = model.dtype
        model = copy.deepcopy(model, {id(blocks): blocks})  # the caller's blocks, which are copied one by one
        for name in uneven:  # as blocks are when they are read: layers of one dtype take what those of another send
            weight = model.get_parameter(name)
            weight.data = as_computed(name, weight.data, held, held)
        move_outer(model, part.architecture.blocks, where)
    place, commit = getattr(model, "name_or_path", ""), commit_of_loaded(model)
    local = Path(place).exists() if place else False  # such a name is no hub id, however it looks
    name = own_name(Path(place)) if local else full_name(place) or type(model).__name__
    processors = Processors(name, TokenizerFiles(Path(place), revision=commit) if place else None, tokenizer)
    return DenseModel(model, name, where, dtype or model.dtype, None, processors, part=part, revision=commit)


def _read_gguf(file: Path, device: torch.device, dtype: torch.dtype | None, component: str | None):
    """As :func:`_read_folder`. All numbers are in fp32: the fingerprint does not depend on the dtype written."""
    written = dtype or torch.bfloat16
    log.info("%s is de-quantised; its weights are written in %s", file.name, str(written).removeprefix("torch."))
    size = file.stat().st_size
    streamed = None if has_room(WIDENED * size) else _stream_gguf(file)
    if streamed is None:
        model = read_gguf(file, torch.float32)
        part = part_of(model, component)
        move_outer(model, part.architecture.blocks, device)
        return model, written, None, size, part
    model, weights = streamed
    part = part_of(model, component)
    fill_outer(model, part.architecture.blocks, weights, torch.float32, device)
    return model, written, weights, size, part


def _stream_gguf(file: Path):
    """The model of a GGUF file, empty, and where its weights are read from; ``None`` where all of it has to be read."""
    with parsed_once(), reporting(CheckpointError, f"{file} cannot be read as GGUF", "download or copy it again"):
        config, biases, numbers = gguf_config(file)
        check_size(config, numbers, file)
        model = _empty(config, torch.float32)
        weights = stream_gguf(file, model)
    if weights is None:
        return None
    check_biases(model, biases, file)
    return model, weights


def _read_folder(
    folder: Path, weights: Weights, device: torch.device, dtype: torch.dtype | None, component: str | None
):
    """The model around its blocks, the dtype weights are written in, where blocks are read from, bytes on disk, and the
    part that is taken."""
    config, size = read_config(folder), weights.bytes_on_disk
    check_quantised(config, str(folder))
    weights.check_config(config)
    storage_dtype = dtype or stored_dtype(config, weights)
    with torch.device("meta"):  # before anything is as large as the config says
        outline = _empty(config, storage_dtype)
    architecture = part_of(outline, component).architecture
    check_quantised(config, str(folder), architecture.blocks)
    if architecture.decoder:
        check_answers(config, str(folder))
    named_alike = weights.match(outline)
    weights.check_fits(outline)
    check_tables(outline)
    held = torch.float32 if device.type == "cpu" else storage_dtype
    model = _empty(config, held)
    stack = part_of(model, component)
    if named_alike:
        if weights.has_untied(model):
            untie(config, str(folder))
            model = _empty(config, held)
        check_unused(weights.unused(model), model, folder)
        fill_outer(model, stack.architecture.blocks, weights, storage_dtype, device)
    else:
        log.info(
            "the checkpoint names its weights differently from the model: reading it as a whole, not block by block"
        )
        model = read_whole(folder, config, held)
        move_outer(model, stack.architecture.blocks, device)
    if generation := read_generation_config(folder):
        model.generation_config = generation
    return model, storage_dtype, weights if named_alike else None, size, stack


def stored_dtype(config, weights: Weights) -> torch.dtype:
    """Return the dtype in which transformers' ``dtype="auto"`` holds a checkpoint: its config's, or else its tensors'.

    Raises:
        CheckpointError: it is not one of the dtypes that can be written.
    """
    stored = config.dtype or weights.dtype
    if stored not in DTYPES.values():
        named = f"{weights.folder / 'config.json'} names" if config.dtype else f"the tensors in {weights.folder} have"
        raise CheckpointError(
            f"{named} the dtype {str(stored).removeprefix('torch.')}, which is not one of {', '.join(DTYPES)}; choose "
            f"one of these with {option('dtype')}"
        )
    return stored


def _empty(config, dtype: torch.dtype):
    with reporting(CheckpointError, "config.json describes no model that can be built"):
        with empty_weights():
            return auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
