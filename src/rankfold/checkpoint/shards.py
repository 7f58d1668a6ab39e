"""The files of a checkpoint: one shard of weights a block, one for the rest, their index, and what lies beside them."""

from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from .._utils.files import sync_files, write_json, write_tensors
from .._utils.sizes import plural
from ..errors import CheckpointError
from ..models.tokenizer import copy_file, save_tokenizer
from ..models.weights import tensor_bytes_in, untied_state


class Shards:
    """Weights of a checkpoint in files.

    Args:
        folder: where they lie.
        blocks: how many there are; the shard behind theirs holds the rest.
    """

    def __init__(self, folder: Path, blocks: int):
        self.folder, self.blocks = folder, blocks

    def path(self, place: int) -> Path:
        """The shard of a block; ``blocks``: of the rest."""
        return self.folder / f"model-{place + 1:05d}-of-{self.blocks + 1:05d}.safetensors"

    def write(self, place: int, state: dict[str, Tensor]) -> None:
        """Write a shard, durably."""
        write_tensors(self.path(place), state, {"format": "pt"})

    def finish(self, outer: dict[str, Tensor]) -> None:
        """Write the tensors outside the blocks, and which shard has which tensor; all blocks must be there."""
        self.write(self.blocks, outer)
        weight_map, size = {}, 0
        for index in range(self.blocks + 1):
            path = self.path(index)
            with safe_open(path, framework="pt") as handle:
                weight_map |= dict.fromkeys(handle.keys(), path.name)
            size += tensor_bytes_in(path)
        write_json(
            self.folder / "model.safetensors.index.json",
            {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))},
        )

    def check(self, model: nn.Module) -> None:
        """Compare names and shapes on disk with the model that the config describes.

        Raises:
            CheckpointError: they differ.
        """
        wanted = {name: tuple(tensor.shape) for name, tensor in untied_state(model).items()}
        found = {}
        for index in range(self.blocks + 1):
            with safe_open(self.path(index), framework="pt") as handle:
                found |= {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
        if wanted != found:
            wrong = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
            raise CheckpointError(
                f"the checkpoint written differs from its config in {plural(len(wrong), 'tensor')}, first {wrong[0]}: "
                f"expected {wanted.get(wrong[0])}, wrote {found.get(wrong[0])}; this is a bug, please report it"
            )


def write_around(folder: Path, source, config) -> None:
    """What transformers needs beside weights: config, settings for generating, tokenizer, what surrounds the model."""
    config.save_pretrained(folder)
    if getattr(source.model, "generation_config", None) is not None:
        source.model.generation_config.save_pretrained(folder)
    write_processors(folder, source)


def write_processors(folder: Path, source) -> None:
    """Write the tokenizer where there is one, and other files that a model's inputs are made by."""
    if source.processors.has_tokenizer:
        save_tokenizer(source.tokenizer, folder)
    files = source.processors.files
    for name in files.around if files else []:
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            copy_file(files.folder / name, folder / name)
            sync_files((folder / name).parent)
