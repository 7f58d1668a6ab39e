"""Where compressed blocks go: a model in memory, or a folder that survives being killed."""

from concurrent.futures import Future, ThreadPoolExecutor

from .._utils.stopwatch import seconds_so_far, time_spent
from ..architectures import BlockView
from ..checkpoint.blocks import BlockFiles
from ..checkpoint.load import assemble
from ..checkpoint.run import RunFolder
from ..methods import BlockResult
from ..models.dense_model import DenseModel
from ..report.plan import Plan
from .result import CompressionResult
from .verify import Probe

__all__ = ["FolderWriter", "MemoryWriter"]


class _BlockWriter:
    """What both have in common: blocks that are kept move up to where removed ones were.

    Args:
        kept: blocks of the dense model that are in the result, ascending.
    """

    def __init__(self, source: DenseModel, kept: tuple[int, ...]):
        self.source, self.kept = source, kept

    def place(self, index: int) -> int | None:
        """Number in the result of block ``index`` of the dense model; ``None`` where it is removed."""
        return self.kept.index(index) if index in self.kept else None

    def path(self, index: int) -> str:
        """Path in the result of a block that is kept."""
        return self.source.architecture.path_of(self.place(index))

    def module_path(self, index: int, name: str) -> str:
        """Path in the result of a module of a block, or of the block itself, which has no name."""
        return f"{self.path(index)}.{name}".rstrip(".")


class MemoryWriter(_BlockWriter):
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

    def finish(self, config, card: str, record: dict, plan: Plan) -> CompressionResult:
        """Put the model together; a card belongs to a folder."""
        model = assemble(self.source, config, self.state)
        seconds = {"seconds": seconds_so_far()}
        record = record | {"run": seconds | record["run"]}
        return CompressionResult(plan, record, model=model, processors=self.source.processors)


class FolderWriter(_BlockWriter):
    """Writes every block when it is done, and reads the whole back before it gets its name.

    Args:
        folder: held by this process, perhaps with blocks of an earlier run.
    """

    def __init__(self, source: DenseModel, folder: RunFolder, kept: tuple[int, ...]):
        super().__init__(source, kept)
        self.folder, self.probe = folder, Probe(source)
        self.files = BlockFiles(folder.path, len(kept))
        self._writer = ThreadPoolExecutor(max_workers=1) if source.overlaps else None
        self._writing: Future | None = None

    def __contains__(self, index: int) -> bool:
        return index in self.files

    def load(self, view: BlockView) -> BlockResult:
        """A block that is done."""
        if view.index not in self.kept:
            return self.files.load_report(view.index)
        return self.files.load_block(view.index, self.place(view.index), self.path(view.index))

    @time_spent("writing")
    def keep(self, view: BlockView, result: BlockResult) -> None:
        """Make a block whose modules have been replaced durable; where writing overlaps, while the next one is computed."""
        if view.index not in self.kept:
            return self.files.save_report(view.index, result)
        place = (self.place(view.index), self.path(view.index))
        block = (view.index, *place, view.module, self.source.dtype, result)
        if self._writer is None:
            return self.files.save_block(*block)
        self._written()
        self._writing = self._writer.submit(self.files.save_block, *block)

    def _written(self) -> None:
        """Wait for the block under way; an error that came up there is raised here."""
        if self._writing is not None:
            self._writing.result()

    def follow(self, view: BlockView) -> None:
        """Note what a compressed block computes, to compare the checkpoint with."""
        self.probe.follow(view)

    @time_spent("writing")
    def finish(self, config, card: str, record: dict, plan: Plan) -> CompressionResult:
        """Write what is not in the blocks, check the whole, and give the folder its name."""
        self._written()
        source = self.source
        self.files.write_rest(source)
        self.probe.check(self.folder.path, self.files.check(config, source))
        record = self.folder.write_rest(source, config, card, record)
        output = self.folder.publish()
        return CompressionResult(plan, record, output, processors=source.processors, device=str(source.device))
