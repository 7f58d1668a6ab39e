"""What the dense model predicts, kept on disk, so that it need not be in memory while the compressed one is trained.

Logits of a million tokens are 98 GB in fp16 with a vocabulary of 49 thousand. Kept are the states that the head reads,
from which it makes the same logits again: 2.3 GB in fp32 with a width of 576.

Shape legend: N sequences, T tokens, D model width.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from .._utils.evaluating import evaluating
from .._utils.files import read_json, read_tensors, reading_tensors, sweep, write_json, write_tensors, writing
from .._utils.locking import lock_of, locked
from .._utils.processes import on_first
from .._utils.progress import track
from ..checkpoint.run import difference
from ..errors import CheckpointError
from ..models.dense_model import DenseModel
from .judging import Losses, score
from .loss import Head, hidden_states
from .training import AT_ONCE, training_context

IDENTITY, LOSSES = "cache.json", "losses.safetensors"
IN_FILE = 16 * AT_ONCE  # tokens whose states are in one file; a kill loses those of one


class CachedStates(Dataset):
    """Sequences with the states that the head of the dense model reads, from a folder.

    Args:
        folder: is filled where it is not yet; what a killed run left of it is used. The first of several processes
            fills it, and all read it.
        source: dense model; it is read as a whole only where something is missing.
        ids: ``(N, T)`` token ids.
        scored: text -> ``(N, T)`` token ids whose losses are kept.
        identity: of the texts.

    Raises:
        CheckpointError: the folder holds something else, or states of other texts or of another model.
    """

    def __init__(self, folder: Path, source: DenseModel, ids: Tensor, scored: dict[str, Tensor], identity: dict):
        self.folder, self.ids = folder, ids
        self.each = max(1, IN_FILE // ids.shape[1])  # sequences of a file
        on_first(lambda: self._complete(source, scored, identity))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids`` ``(T,)`` and ``dense`` ``(T, D)`` of a sequence."""
        file, row = divmod(index, self.each)
        return {"input_ids": self.ids[index], "dense": self._file(file).get_slice("states")[row]}

    @functools.cached_property
    def losses(self) -> Losses:
        """Losses of the dense model on every scored text."""
        found: Losses = {}
        path = self.folder / LOSSES
        for name, losses in sorted(read_tensors(path, path).items()):
            found.setdefault(name.rpartition("/")[0], []).append(losses)
        return found

    def _path(self, file: int) -> Path:
        return self.folder / f"states-{file:05d}.safetensors"

    @functools.cache  # noqa: B019 - as many as there are files, which are mapped
    def _file(self, file: int) -> Any:
        path = self._path(file)
        with reading_tensors(path, path):
            return safe_open(path, framework="pt")

    def _complete(self, source: DenseModel, scored: dict[str, Tensor], identity: dict) -> None:
        with locked(lock_of(self.folder), self.folder):
            self._claim(identity)
            self._fill(source, scored)

    def _claim(self, identity: dict) -> None:
        """Take the folder, whose states must be of the same texts and model."""
        path = self.folder / IDENTITY
        if not path.exists():
            with writing(self.folder):
                if self.folder.exists() and any(other.name != f"{IDENTITY}.tmp" for other in self.folder.iterdir()):
                    raise CheckpointError(f"{self.folder} holds something else; choose a new folder, or remove it")
                self.folder.mkdir(exist_ok=True)
            return write_json(path, identity)
        found = read_json(path, self.folder)
        if found != identity:
            raise CheckpointError(
                f"{self.folder} holds the predictions of another model or on other texts "
                f"({difference(found, identity)}); choose a new folder, or remove it"
            )
        sweep(self.folder)

    def _fill(self, source: DenseModel, scored: dict[str, Tensor]) -> None:
        """Compute what is missing, with the dense model in memory."""
        parts = self.ids.split(self.each)
        missing = [file for file in range(len(parts)) if not self._path(file).exists()]
        if not missing and (self.folder / LOSSES).exists():
            return
        dense: Any = source.whole_model()
        head = Head(dense)
        if not (self.folder / LOSSES).exists():
            losses = score(dense, head, scored)
            each = {f"{name}/{i:05d}": x for name, some in losses.items() for i, x in enumerate(some)}
            write_tensors(self.folder / LOSSES, each)
        for file in track(missing, "predictions of the dense model"):
            write_tensors(self._path(file), {"states": _states(dense, head, parts[file])})


@torch.no_grad()
def _states(dense: PreTrainedModel, head: Head, ids: Tensor) -> Tensor:
    """Return the ``(N, T, D)`` states that the head reads, computed as they are beside a training."""
    with evaluating(dense), training_context(dense.device):
        found = [
            hidden_states(dense, head.decoder, some.to(dense.device)).cpu()
            for some in ids.split(max(1, AT_ONCE // ids.shape[1]))
        ]
    return torch.cat(found)
