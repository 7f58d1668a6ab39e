"""Opening a checkpoint, compressed or dense, to run it one block at a time."""

from pathlib import Path

import torch

from .._utils.files import own_name
from .._utils.reporting import reporting
from ..architectures import part_of
from ..errors import CheckpointError, OptionError, UnsupportedModelError, option
from ..models.dense_model import DenseModel
from ..models.devices import resolve_device, resolve_dtype
from ..models.given import resolve_model
from ..models.opening import stored_dtype
from ..models.processors import Processors
from ..models.tables import check_tables
from ..models.tokenizer import TokenizerFiles
from ..models.weights import fill_outer
from ..models.whole import check_head, check_loaded, read_config, untie
from ..modules import attach
from .load import described, empty_model, is_known, match_names


def open_streamed(model: str | Path, *, dtype: str = "auto", device: str = "auto") -> DenseModel:
    """Open a model whose blocks are read one at a time, in the dtype in which :func:`~.load.load_model` holds them.

    Args:
        model: hub id (``owner/name``, or ``owner/name@revision``) or folder, compressed by rankfold or dense.
        dtype: ``auto`` (as stored) or a dtype.
        device: where blocks run.

    Raises:
        OptionError: it can be read as a whole only: a ``.gguf`` file, or weights under other names than the model's.
        UnsupportedModelError: it is quantised by others, or its family has no spec.
        CheckpointError: it does not hold what its config describes.
        NumericsError: a weight around the blocks is NaN or infinite (named).
    """
    (path, weights), where = resolve_model(model), resolve_device(device)
    whole = f"leave {option('stream')} out"
    if weights is None:
        raise OptionError(f"{model} is a GGUF file, which is read as a whole; {whole}")
    config = read_config(path)
    weights.check_config(config)
    if not is_known(config):
        raise UnsupportedModelError(f"{model} is quantised, and runs as a whole only; {whole}")
    held = resolve_dtype(dtype) or stored_dtype(config, weights)
    broken = reporting(CheckpointError, f"{model} cannot be loaded", "copy or make it again")
    with broken, torch.device("meta"):  # before anything is as large as the config says
        outline = empty_model(config)
    if not match_names(weights, outline, config):
        raise OptionError(f"{model} names its weights differently from the model, so it is read as a whole; {whole}")
    weights.check_fits(outline)
    check_tables(outline)
    compressed = described(config)
    unused = {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": weights.unused(outline)}
    check_loaded(unused, outline, path, only_described=compressed is not None)
    if compressed is not None:
        check_head(weights.has_untied(outline), path)
    elif weights.has_untied(outline):
        untie(config, own_name(path))
    network = empty_model(config, dtype=held)
    part = part_of(network)
    if part.architecture.derived:
        raise UnsupportedModelError(f"model type {part.config.model_type!r} has no spec to run its blocks by; {whole}")
    if compressed is not None:
        attach(network, compressed)
    fill_outer(network, part.architecture.blocks, weights, held, where)
    processors = Processors(own_name(path), TokenizerFiles.beside(path))
    return DenseModel(network, own_name(path), where, held, weights, processors, weights.bytes_on_disk, part)
