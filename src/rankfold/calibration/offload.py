"""Hidden states kept off the device: in host memory next to an accelerator, or in a file.

Every batch comes back with the bytes that it had, so a run computes the same numbers wherever they are kept.
"""

import os
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from .._utils.files import writing
from ..errors import CheckpointError, OptionError, option
from .observers import DenseBatch


@dataclass(frozen=True)
class Offload:
    """Where hidden states are kept.

    Attributes:
        device: where they are computed.
        folder: of the files they are kept in; ``None``: in host memory.
    """

    device: torch.device
    folder: Path | None = None

    @property
    def name(self) -> str:
        """Return what a record calls it: ``cpu`` or ``disk``."""
        return "cpu" if self.folder is None else "disk"

    @property
    def held(self) -> int:
        """Return how many batches of each stream the device holds: the one in use, and on a CPU the one read ahead."""
        return 2 if self.device.type == "cpu" else 1

    def states(self) -> "OffloadedStates":
        """Return a new, empty sequence of hidden states."""
        return StatesInMemory(self.device) if self.folder is None else StatesOnDisk(self.device, self.folder)


def resolve_offload(value: str | Path | None, device: torch.device) -> Offload | None:
    """Return where hidden states are kept; ``None``: on the device.

    Args:
        value: ``cpu``, or an existing folder.
        device: where blocks run.

    Raises:
        OptionError: it is neither, or hidden states are in host memory anyway.
    """
    if value is None:
        return None
    if str(value) == "cpu":
        if device.type == "cpu":
            raise OptionError(
                f"{option('offload', 'cpu')} has no effect where blocks run on the CPU: hidden states are in host "
                "memory already; give a folder on a disk, or leave it out"
            )
        return Offload(device)
    folder = Path(value).expanduser()
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(
            f"{option('offload')} takes cpu or an existing folder that can be written, got {str(value)!r}"
        )
    return Offload(device, folder)


class OffloadedStates(Sequence[Tensor]):
    """Hidden states of a stream, batch by batch; the one that is in use is on the device.

    Takes the place of a list of tensors: ``states[i]``, ``states[i] = output``, ``append``, ``copy``, ``len``.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._current: tuple[int, Tensor] | None = None

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._current is None or self._current[0] != index:
            self._current = None  # two would be held otherwise
            self._current = index, self._fetch(index).to(self.device, non_blocking=True)
        return self._current[1]

    def __setitem__(self, index: int, states: Tensor) -> None:
        self._current = None
        self._keep(index, states.detach())

    def append(self, states: Tensor) -> None:
        """Add a batch at the end."""
        self[len(self)] = states

    def copy(self) -> Self:
        """Return another sequence of the same states."""
        raise NotImplementedError

    def _fetch(self, index: int) -> Tensor:
        """Return a batch in host memory."""
        raise NotImplementedError

    def _keep(self, index: int, states: Tensor) -> None:
        """Keep a batch in place of the one of this number, or after the last one."""
        raise NotImplementedError


class StatesInMemory(OffloadedStates):
    """Hidden states in host memory, page-locked where a device copies faster from there.

    All copies are queued on the device in the order of its work, so that none waits for the host.
    """

    def __init__(self, device: torch.device, kept: Sequence[Tensor] = ()):
        super().__init__(device)
        self._kept = list(kept)

    def __len__(self) -> int:
        return len(self._kept)

    def copy(self) -> Self:
        return type(self)(self.device, self._kept)

    def _fetch(self, index: int) -> Tensor:
        return self._kept[index]

    def _keep(self, index: int, states: Tensor) -> None:
        kept = torch.empty(states.shape, dtype=states.dtype, device="cpu", pin_memory=_locks(self.device))
        self._kept[index : index + 1] = [kept.copy_(states, non_blocking=True)]  # a copy of these may have the old one


class DenseBatches(Sequence[DenseBatch]):
    """What one block makes of all batches of the dense model's stream."""

    def __init__(self, offload: Offload):
        self._offload, self._middle, self._output = offload, offload.states(), offload.states()
        self._inputs: dict[str, OffloadedStates] = {}

    def __len__(self) -> int:
        return len(self._output)

    def __getitem__(self, index: Any) -> Any:
        inputs = {name: states[index] for name, states in self._inputs.items()}
        return DenseBatch(self._middle[index], self._output[index], inputs)

    def append(self, batch: DenseBatch) -> None:
        """Add a batch at the end."""
        self._middle.append(batch.middle)
        self._output.append(batch.output)
        for name, entered in batch.inputs.items():
            self._inputs.setdefault(name, self._offload.states()).append(entered)


class _Place(NamedTuple):
    start: int  # in the file, in bytes
    shape: torch.Size
    dtype: torch.dtype


class StatesOnDisk(OffloadedStates):
    """Hidden states in a file without a name, which goes with the process however that ends.

    One thread reads the next batch and writes the last one while the caller computes.
    """

    def __init__(self, device: torch.device, folder: Path):
        super().__init__(device)
        self.folder, self._places, self._end = folder, list[_Place](), 0
        with writing(folder):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  it lives as long as this
        weakref.finalize(self, self._file.close)  # what the thread still has to do refers to this
        self._thread = ThreadPoolExecutor(max_workers=1)  # what it is given runs in this order
        self._ahead: tuple[int, Future[Tensor]] | None = None
        self._written: Future[None] | None = None  # of the last batch

    def __len__(self) -> int:
        return len(self._places)

    def copy(self) -> Self:
        other = type(self)(self.device, self.folder)
        for index in range(len(self)):
            other._keep(index, self._read_by_thread(index).result())
        return other

    def _fetch(self, index: int) -> Tensor:
        ahead, self._ahead = self._ahead, None
        found = ahead[1] if ahead and ahead[0] == index else self._read_by_thread(index)
        if index + 1 < len(self):
            self._ahead = index + 1, self._read_by_thread(index + 1)
        wait([found])
        if self._written is not None and self._written.done():
            self._written.result()  # an error of an earlier write is why a read fails
        return found.result()

    def _keep(self, index: int, states: Tensor) -> None:
        if self._written is not None:
            self._written.result()  # one waits at most
        if self._ahead and self._ahead[0] == index:
            self._ahead = None
        if index == len(self):
            self._places.append(_Place(self._end, states.shape, states.dtype))
            self._end += states.nbytes
        if self._places[index][1:] != (states.shape, states.dtype):
            raise ValueError(f"{self._places[index]} is no place for {states.dtype} of {tuple(states.shape)}")
        self._written = self._thread.submit(self._write, self._places[index], states.cpu().contiguous())

    def _read_by_thread(self, index: int) -> "Future[Tensor]":
        place = self._places[index]  # what a thread allocates, the system may not get back when another one frees it
        states = torch.empty(place.shape, dtype=place.dtype, device="cpu", pin_memory=_locks(self.device))
        return self._thread.submit(self._read, place, states)

    def _read(self, place: _Place, states: Tensor) -> Tensor:
        self._file.seek(place.start)
        if self._file.readinto(_bytes(states)) != states.nbytes:
            raise CheckpointError(
                f"a file of hidden states in {self.folder} is shorter than what was written to it; check the disk, "
                "give the same command again"
            )
        return states

    def _write(self, place: _Place, states: Tensor) -> None:
        with writing(self.folder):
            self._file.seek(place.start)
            self._file.write(_bytes(states))
            self._file.flush()


def _locks(device: torch.device) -> bool:
    """Tell whether a device copies faster from page-locked memory; the memory of a Mac is its device's."""
    return torch.accelerator.is_available() and device.type not in ("cpu", "mps")


def _bytes(tensor: Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy()
