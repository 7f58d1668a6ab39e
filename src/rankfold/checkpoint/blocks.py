"""The finished blocks of a run: one safetensors shard and one report each."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from .._utils.files import read_json, read_tensors, write_json, write_tensors
from ..methods import BlockResult
from ..models.weights import as_written
from ..modules import tied_weights
from .load import attention_of, empty_model
from .shards import Shards


class BlockFiles:
    """Blocks of a result in a folder.

    Args:
        folder: where they lie, and will be loaded from.
        kept: blocks of the dense model that are in the result, ascending.
        path_of: number of a block in the result -> its path there.
    """

    def __init__(self, folder: Path, kept: tuple[int, ...], path_of: Callable[[int], str]):
        self.folder, self.shards = folder, Shards(folder, len(kept))
        # Of the dense model's block: its number in the result, and what the names of its tensors begin with there.
        self.places = {index: (place, f"{path_of(place)}.") for place, index in enumerate(kept)}

    def __contains__(self, index: int) -> bool:
        return self._report(index).exists()  # written after the shard

    def _basis(self, index: int) -> Path:
        """What the run needs of a block and the result lacks or holds in another one: ``basis``, and tied tensors."""
        return self.folder / f"basis-{index:05d}.safetensors"

    def _report(self, index: int) -> Path:
        return self.folder / f"block-{index:05d}.json"

    def save_block(self, index: int, module: nn.Module, dtype: torch.dtype, result: BlockResult) -> None:
        """Make a finished block of the dense model durable; of one that is removed there is the report only."""
        if index in self.places:
            self._save_tensors(index, module, dtype, result)
        changed = [name for name in result.state if not name.startswith(_inside(result))]  # in modules that are kept
        write_json(self._report(index), {"modules": result.modules, "changed": changed, "reports": result.reports})

    def _save_tensors(self, index: int, module: nn.Module, dtype: torch.dtype, result: BlockResult) -> None:
        place, prefix = self.places[index]
        state = {prefix + name: as_written(name, tensor, dtype) for name, tensor in module.state_dict().items()}
        beside = {name: state.pop(prefix + name) for name in tied_weights(module)}
        self.shards.write(place, state)
        beside |= {"basis": result.basis} if result.basis is not None else {}
        if beside:
            write_tensors(self._basis(index), beside, {"format": "pt"})

    def load_block(self, index: int) -> BlockResult:
        """Read a finished block of the dense model."""
        facts = read_json(self._report(index), self.folder)
        found = BlockResult(facts["modules"], {}, facts["reports"])
        if index not in self.places:
            return found
        place, prefix = self.places[index]
        state = read_tensors(self.shards.path(place), self.folder)
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        beside = read_tensors(self._basis(index), self.folder) if self._basis(index).exists() else {}
        basis = beside.pop("basis", None)
        state |= beside
        inside, changed = _inside(found), set(facts["changed"])
        kept = {name: tensor for name, tensor in state.items() if name.startswith(inside) or name in changed}
        return replace(found, state=kept, basis=basis)

    def check(self, config, source) -> PreTrainedModel:
        """Return the empty model that the config describes, once names and shapes on the disk are its own.

        Raises:
            CheckpointError: they are not.
        """
        model = empty_model(config, attention_of(source.model.config), source.compute_dtype)
        self.shards.check(model)
        return model


def _inside(result: BlockResult) -> tuple[str, ...]:
    """What the names of a block's tensors begin with that belong to modules of ours."""
    return tuple(f"{path}." if path else "" for path in result.modules)
