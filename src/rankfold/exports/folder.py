"""Writing a padded model as a Hugging Face folder, and reading it back."""

from pathlib import Path

import torch

from .._utils.progress import track
from ..checkpoint.shards import Shards, write_around
from ..compression.verify import Probe
from ..models.dense_model import DenseModel
from .form import StockModel
from .padding import padded_state


def write_folder(source: DenseModel, form: StockModel, folder: Path, probe: Probe) -> float:
    """Write a model block by block and read it back.

    Returns:
        How far its logits are from those of ``source``, of their norm.

    Raises:
        UnsupportedModelError: something has no place in the form.
        CheckpointError: what was written computes something else.
    """
    folder.mkdir()
    shards, empty = Shards(folder, len(source)), form.empty()
    for index in track(range(len(source)), "exporting"):
        view, stock = source.block(index), form.view(empty, index)
        state = padded_state(view, stock, source.dtype, form.places)
        shards.write(index, {f"{view.path}.{name}": tensor for name, tensor in state.items()})
        probe.follow(view)
    shards.finish(source.outer_state())
    again = form.empty(torch.float32)
    shards.check(again)
    form.config.architectures, form.config.dtype = [type(source.model).__name__], source.dtype
    write_around(folder, source, form.config)
    return probe.check(folder, again)
