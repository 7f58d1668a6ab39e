"""Where compressed blocks go: a model in memory, or a folder that survives being killed."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

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


class BlockWriter:
    """What both have in common: blocks that are kept move up to where removed ones were.

    Args:
        kept: blocks of the dense model that are in the result, ascending.
    """

    def __init__(self, source: DenseModel, kept: tuple[int, ...]):
        self.source, self.kept = source, kept

    def path(self, index: int) -> str:
        """Return the path in the result of a block that is kept."""
        return self.source.architecture.path_of(self.kept.index(index))

    def module_path(self, index: int, name: str) -> str:
        """Return the path in the result of a module of a block, or of the block itself, which has no name."""
        return f"{self.path(index)}.{name}".rstrip(".")

    def load(self, index: int) -> BlockResult | None:
        """Read a block that an earlier run has finished; ``None`` where it has not."""
        return None

    def keep(self, view: BlockView, result: BlockResult) -> None:
        """Take a block whose modules have been replaced."""
        raise NotImplementedError

    def follow(self, view: BlockView) -> None:
        """Note what a compressed block computes; by default nothing, as nothing gets lost on the way to memory."""

    def finish(self, config: PreTrainedConfig, card: str, record: dict[str, Any], plan: Plan) -> CompressionResult:
        """Put the model together."""
        raise NotImplementedError


class NoWriter(BlockWriter):
    """Stands in every process but the first, which alone writes.

    Args:
        output: the folder that the first process writes.
    """

    def __init__(self, source: DenseModel, kept: tuple[int, ...], output: Path | None):
        super().__init__(source, kept)
        self.output = output

    def keep(self, view: BlockView, result: BlockResult) -> None:
        """Do nothing."""

    def finish(self, config: PreTrainedConfig, card: str, record: dict[str, Any], plan: Plan) -> CompressionResult:
        """Describe what the first process writes; a model in memory is in the memory of that process only."""
        record = record | {"run": {"seconds": seconds_so_far()} | record["run"]}
        return CompressionResult(plan, record, self.output, device=str(self.source.device))


class MemoryWriter(BlockWriter):
    """Keeps the tensors of all blocks in host memory until the model is put together: the device holds one block."""

    def __init__(self, source: DenseModel, kept: tuple[int, ...]):
        super().__init__(source, kept)
        self.state: dict[str, Tensor] = {}

    def keep(self, view: BlockView, result: BlockResult) -> None:
        if view.index in self.kept:
            path = self.path(view.index)
            self.state |= {f"{path}.{name}": tensor.cpu() for name, tensor in view.module.state_dict().items()}

    def finish(self, config: PreTrainedConfig, card: str, record: dict[str, Any], plan: Plan) -> CompressionResult:
        """Put the model together; a card belongs to a folder."""
        model = assemble(self.source, config, self.state)
        record = record | {"run": {"seconds": seconds_so_far()} | record["run"]}
        return CompressionResult(plan, record, model=model, processors=self.source.processors)


class FolderWriter(BlockWriter):
    """Writes every block when it is done, and reads the whole back before it gets its name.

    Args:
        folder: held by this process, perhaps with blocks of an earlier run.
    """

    def __init__(self, source: DenseModel, folder: RunFolder, kept: tuple[int, ...]):
        super().__init__(source, kept)
        self.folder, self.probe = folder, Probe(source)
        self.files = BlockFiles(folder.path, kept, source.architecture.path_of)
        self._writer = ThreadPoolExecutor(max_workers=1) if source.overlaps else None
        self._writing: Future[None] | None = None

    def load(self, index: int) -> BlockResult | None:
        return self.files.load_block(index) if index in self.files else None

    @time_spent("writing")
    def keep(self, view: BlockView, result: BlockResult) -> None:
        """Make a block durable; where writing overlaps, while the next one is computed."""
        self.folder.keep_seconds()
        block = (view.index, view.module, self.source.dtype, result)
        if self._writer is None:
            return self.files.save_block(*block)
        self._written()
        self._writing = self._writer.submit(self.files.save_block, *block)

    def _written(self) -> None:
        """Wait for the block under way; an error that came up there is raised here."""
        if self._writing is not None:
            self._writing.result()

    def follow(self, view: BlockView) -> None:
        self.probe.follow(view)

    @time_spent("writing")
    def finish(self, config: PreTrainedConfig, card: str, record: dict[str, Any], plan: Plan) -> CompressionResult:
        """Write what is not in the blocks, check the whole, and give the folder its name."""
        self._written()
        source = self.source
        self.files.shards.finish(source.outer_state())
        self.probe.check(self.folder.path, self.files.check(config, source))
        record = self.folder.write_rest(source, config, card, record)
        output = self.folder.publish()
        return CompressionResult(plan, record, output, processors=source.processors, device=str(source.device))
