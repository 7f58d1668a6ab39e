"""A compressed checkpoint, opened to be written in another form."""

from pathlib import Path

import torch

from .._utils.files import own_name
from ..models.auto_classes import check_writes
from ..models.dense_model import DenseModel
from ..models.devices import resolve_dtype
from ..models.given import resolve_model
from ..models.opening import stored_dtype
from ..models.processors import Processors
from ..models.tokenizer import TokenizerFiles
from ..models.whole import read_config
from .load import load_files


def open_compressed(model: str | Path, *, dtype: str = "auto") -> DenseModel:
    """Open what `rankfold compress` wrote, or any other model transformers loads, on the CPU.

    All weights are in memory, in fp32, so that what is computed from them differs by nothing but rounding.

    Args:
        model: hub id, folder or ``.gguf`` file.
        dtype: what is to be written; ``auto``: as the checkpoint stores it, bfloat16 of a file.

    Raises:
        CheckpointError: it cannot be read, or does not hold what its config describes.
        UnsupportedModelError: its family is unknown, or an encoder.
    """
    path, weights = files = resolve_model(model)
    written = resolve_dtype(dtype) or (stored_dtype(read_config(path), weights) if weights else torch.bfloat16)
    loaded = load_files(files, torch.float32, own_name(path))
    check_writes(loaded.config, own_name(path))
    return DenseModel(
        loaded,
        own_name(path),
        torch.device("cpu"),
        written,
        processors=Processors(own_name(path), TokenizerFiles.beside(path)),
    )
