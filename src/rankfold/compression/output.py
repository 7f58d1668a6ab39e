"""Where compressed blocks go: a model in memory, or a folder that survives being killed."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import nn

from .._utils.stopwatch import time_spent
from ..architectures import BlockView
from ..checkpoint.load import assemble
from ..checkpoint.run import Run
from ..methods import BlockResult
from ..models.dense_model import DenseModel
from .verify import Probe

__all__ = ["FolderWriter", "MemoryWriter"]


class _Into:
    """What all places have in common: blocks that stay move up to where removed ones were.

    Args:
        kept: blocks of the dense model that are in the result, ascending.
    """

    def __init__(self, source: DenseModel, kept: tuple[int, ...]):
        self.source, self.kept = source, kept

    def place(self, index: int) -> int | None:
        """Number in the result of block ``index`` of the dense model; ``None`` where it is removed."""
        return self.kept.index(index) if index in self.kept else None

    def path(self, index: int) -> str:
        """Path in the result of a block that stays."""
        return self.source.architecture.path_of(self.place(index))


class MemoryWriter(_Into):
    """Keeps the tensors of all blocks in host memory until the model is put together: a device holds one block at a time."""

    def __init__(self, source: DenseModel, kept: tuple[int, ...]):
        super().__init__(source, kept)
        self.state = {}

    def __contains__(self, index: int) -> bool:
        return False

    def keep(self, view: BlockView, result: BlockResult) -> None:
        """Take a block whose modules have been replaced."""
        if view.index in self.kept:
            path = self.path(view.index)
            self.state |= {f"{path}.{name}": tensor.cpu() for name, tensor in view.module.state_dict().items()}

    def follow(self, view: BlockView) -> None:
        """Nothing can get lost on the way to memory."""

    def finish(self, config, card: str, record: dict) -> nn.Module:
        """The compressed model; card and record belong to a folder."""
        return assemble(self.source, config, self.state)


class FolderWriter(_Into):
    """Writes every block when it is done, and reads the whole back before it gets its name.

    Args:
        run: the folder, perhaps with blocks of an earlier run.
    """

    def __init__(self, source: DenseModel, run: Run, kept: tuple[int, ...]):
        super().__init__(source, kept)
        self.run, self.probe = run, Probe(source)
        run.blocks = len(kept)
        self._writer = ThreadPoolExecutor(max_workers=1) if source.overlaps else None
        self._writing: Future | None = None

    def __contains__(self, index: int) -> bool:
        return index in self.run

    def load(self, view: BlockView) -> BlockResult:
        """A block that is done."""
        if view.index not in self.kept:
            return self.run.load_report(view.index)
        return self.run.load_block(view.index, self.place(view.index), self.path(view.index))

    @time_spent("writing")
    def keep(self, view: BlockView, result: BlockResult) -> None:
        """Make a block whose modules have been replaced durable; where writing overlaps, while the next one is computed."""
        if view.index not in self.kept:
            return self.run.save_report(view.index, result)
        place = (self.place(view.index), self.path(view.index))
        block = (view.index, *place, view.module, self.source.dtype, result)
        if self._writer is None:
            return self.run.save_block(*block)
        self._written()
        self._writing = self._writer.submit(self.run.save_block, *block)

    def _written(self) -> None:
        """Wait for the block under way; an error that came up there is raised here."""
        if self._writing is not None:
            self._writing.result()

    def follow(self, view: BlockView) -> None:
        """Note what a compressed block computes, to compare the checkpoint with."""
        self.probe.follow(view)

    @time_spent("writing")
    def finish(self, config, card: str, record: dict) -> Path:
        """The folder, complete and checked."""
        self._written()
        return self.run.finish(self.source, config, card, record, self.probe.check)
