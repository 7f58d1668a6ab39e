"""Writing a compressed checkpoint so that a killed run can go on, and nothing unfinished looks finished.

While a run is under way everything lies in ``OUT.partial``: its configuration, one safetensors shard per finished block,
and what was measured there. When all is written and checked, removing ``run.json`` declares the rest to be the checkpoint;
what belonged to the run is cleared away and the folder renamed to ``OUT``. A kill before that removal leaves a run to go on
with, one behind it a checkpoint that lacks its name only: clearing and renaming can be repeated. An error renames ``run.json``
to ``failed.json``: the same configuration goes on, and any other replaces it, as the error may have asked for.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from .._utils.files import (
    check_output,
    read_json,
    sweep,
    sync_files,
    sync_folder,
    write_json,
    write_tensors,
    write_text,
    writing,
)
from .._utils.locking import lock_of, locked
from .._utils.stopwatch import seconds_so_far
from ..data.calibration_data import upgrade_calibration
from ..errors import CheckpointError
from ..methods import BlockResult
from ..modules import CODE_FILE, code
from .load import described, empty_model
from .shards import Shards, write_around

__all__ = ["Run", "as_written"]

log = logging.getLogger(__name__)

CONFIG, FAILED, RECORD, COSTS, TIMES = "run.json", "failed.json", "rankfold.json", "costs.json", "times.json"
MOMENTS, GRADIENTS, BEFORE = "moments", "gradients", "before"


class Run:
    """The folder a compression writes to.

    Args:
        output: the final folder; must not exist.
        identity: configuration of the run; an unfinished run is continued only if it is equal. Under ``before``, that of
            another part of the model, which is compressed first.

    Attributes:
        blocks: of the result; known once ranks are.
    """

    def __init__(self, output: str | Path, identity: dict):
        self.output, self.identity, self.blocks = Path(output), identity, 0
        self.folder = self.output.with_name(self.output.name + ".partial")

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Keep the folder to this process; after an error it is no obstacle to a run of another configuration.

        Raises:
            CheckpointError: the output exists, holds an unfinished run of another configuration, is written by another
                process, or cannot be written.
        """
        check_output(self.output)
        with locked(lock_of(self.output), self.output):
            check_output(self.output)  # the process that had the lock may just have finished
            with writing(self.folder):
                self._claim()
            try:
                yield
            except Exception:
                with contextlib.suppress(OSError):  # the error is what to tell
                    self._give_up()
                raise

    def _claim(self) -> None:
        self._take_over_failed()
        found = self._found()
        if found is not None and found != self.identity:
            raise CheckpointError(
                f"{self.folder} is an unfinished run of another configuration; repeat that one, remove the folder, or "
                "choose another output"
            )
        self.folder.mkdir(exist_ok=True)
        sweep(self.folder)
        if found is None:
            write_json(self.folder / CONFIG, self.identity)

    def _take_over_failed(self) -> None:
        """Go on with a run that ended in an error, or clear away that of another configuration."""
        failed = self.folder / FAILED
        if not failed.exists():
            return
        if upgrade_calibration(read_json(failed)) == self.identity:
            return os.replace(failed, self.folder / CONFIG)
        log.warning("%s held a run of another configuration that had ended in an error; it is replaced", self.folder)
        for path in sorted(self.folder.iterdir()):
            if path != failed:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        failed.unlink()  # last: without it the rest would be taken for something else

    def _found(self) -> dict | None:
        """Configuration of what lies in the folder; ``None`` where nothing does."""
        if not os.path.lexists(self.folder):
            return None
        if (self.folder / CONFIG).exists():
            return upgrade_calibration(read_json(self.folder / CONFIG))
        if self.complete:
            return _identified(upgrade_calibration(read_json(self.folder / RECORD)), self.identity)
        if not self.folder.is_dir() or {path.name for path in self.folder.iterdir()} - {f"{CONFIG}.tmp"}:
            raise CheckpointError(
                f"{self.folder} exists and is not an unfinished run; remove it or choose another output"
            )
        return None

    @property
    def complete(self) -> bool:
        """Whether all is written and checked; :meth:`publish` is what is left to do."""
        unfinished = any((self.folder / name).exists() for name in (CONFIG, FAILED))
        return (self.folder / RECORD).exists() and not unfinished

    def _give_up(self) -> None:
        """Note that the run ended in an error, or remove it where nothing in it was worth keeping."""
        if self.complete:
            return
        if any(path.name.startswith(("block-", "model-")) for path in self.folder.rglob("*")):
            return os.replace(self.folder / CONFIG, self.folder / FAILED)  # takes no room on a full disk
        self._clear_away()
        sweep(self.folder)
        (self.folder / CONFIG).unlink()  # last: a folder without it is not taken for a run
        self.folder.rmdir()

    @property
    def _shards(self) -> Shards:
        return Shards(self.folder, self.blocks)

    def _basis(self, index: int) -> Path:
        return self.folder / f"basis-{index:05d}.safetensors"

    def _report(self, index: int) -> Path:
        return self.folder / f"block-{index:05d}.json"

    def __contains__(self, index: int) -> bool:
        return self._report(index).exists()  # written after the shard

    @property
    def moments(self) -> Path:
        """Where an allocation keeps the moments it needs before the first block."""
        return self.folder / MOMENTS

    @property
    def gradients(self) -> Path:
        """Where the statistics of a backward pass are kept."""
        return self.folder / GRADIENTS

    @property
    def costs(self) -> Path:
        """Where a measured allocation keeps what every rank would cost."""
        return self.folder / COSTS

    @property
    def times(self) -> Path:
        """Where a budget in time keeps what was measured."""
        return self.folder / TIMES

    @property
    def before(self) -> Path:
        """Where the part that is compressed first lies, in a folder of its name, until this one is done."""
        return self.folder / BEFORE

    @property
    def earlier(self) -> dict | None:
        """Record of that part, once it is done."""
        found = sorted(self.before.glob(f"*/{RECORD}"))
        return upgrade_calibration(read_json(found[0])) if found else None

    def _clear_away(self) -> None:
        for folder in (self.moments, self.gradients, self.before):
            if folder.exists():
                shutil.rmtree(folder)
        for path in (self.costs, self.times):
            path.unlink(missing_ok=True)

    def save_block(
        self, index: int, place: int, prefix: str, module: nn.Module, dtype: torch.dtype, result: BlockResult
    ) -> None:
        """Make one finished block durable.

        Args:
            index: in the dense model.  place, prefix: number and path in the result.
        """
        state = {f"{prefix}.{name}": as_written(tensor, dtype) for name, tensor in module.state_dict().items()}
        self._shards.write(place, state)
        if result.basis is not None:
            write_tensors(self._basis(index), {"basis": result.basis}, {"format": "pt"})
        self.save_report(index, result)

    def save_report(self, index: int, result: BlockResult) -> None:
        """Note that a block is done; all there is of one that is removed."""
        changed = [name for name in result.state if not name.startswith(_inside(result))]  # in modules that stay
        write_json(self._report(index), {"modules": result.modules, "changed": changed, "reports": result.reports})

    def load_block(self, index: int, place: int, prefix: str) -> BlockResult:
        """A finished block; arguments as for :meth:`save_block`."""
        found, changed = self._load_report(index)
        state = self._load(self._shards.path(place))
        state = {name.removeprefix(prefix + "."): tensor for name, tensor in state.items()}
        basis = self._load(self._basis(index))["basis"] if self._basis(index).exists() else None
        kept = {name: tensor for name, tensor in state.items() if name.startswith(_inside(found)) or name in changed}
        return found._replace(state=kept, basis=basis)

    def _load(self, file: Path) -> dict[str, Tensor]:
        try:
            return load_file(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged ({error}); remove {self.folder} and start again") from error

    def load_report(self, index: int) -> BlockResult:
        """A finished block without its tensors."""
        return self._load_report(index)[0]

    def _load_report(self, index: int) -> tuple[BlockResult, set[str]]:
        """And the tensors that changed in modules that stay."""
        facts = read_json(self._report(index))
        return BlockResult(facts["modules"], {}, facts["reports"]), set(facts["changed"])

    def finish(self, source, config, card: str, record: dict, check: Callable) -> Path:
        """Write what is not in the blocks, check the whole, and rename the folder to the output.

        Args:
            check: called with the folder and the empty model its config describes once names and shapes are right; raises
                where they compute otherwise.
        """
        outer = {name: as_written(tensor, source.dtype) for name, tensor in source.outer_state().items()}
        self._shards.write(self.blocks, outer)
        self._shards.write_index()
        model = empty_model(config, source.model.config._attn_implementation, source.compute_dtype)
        self._shards.check(model)
        check(self.folder, model)
        with writing(self.folder):
            write_around(self.folder, source, config)
            if described(config) is not None:
                write_text(self.folder / CODE_FILE, code())
            write_text(self.folder / "README.md", card)
            spent = {"seconds": seconds_so_far()}  # those of the check, too
            write_json(self.folder / RECORD, record | {"run": spent | record["run"]})
            sync_files(self.folder)
            (self.folder / CONFIG).unlink()
        return self.publish()

    def publish(self) -> Path:
        """Clear away what belonged to the run and rename the folder to the output."""
        with writing(self.folder):
            for path in [*sorted(self.folder.glob("block-*.json")), *self.folder.glob("basis-*.safetensors")]:
                path.unlink()
            self._clear_away()
            sync_folder(self.folder)
        if os.path.lexists(self.output):
            raise CheckpointError(
                f"{self.output} appeared while the run was under way; the finished checkpoint is {self.folder}: rename it, "
                f"or remove {self.output} and give the same command again"
            )
        with writing(self.output):
            os.rename(self.folder, self.output)
            sync_folder(self.output.resolve().parent)
        return self.output


def as_written(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as it is written: floats in the model's dtype, indices as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _identified(record: dict, identity: dict) -> dict:
    """What a record says in place of an identity."""
    found = {key: record.get(key) for key in identity}
    if "before" in identity and isinstance(found["before"], dict):
        found["before"] = _identified(found["before"], identity["before"])
    return found


def _inside(result: BlockResult) -> tuple[str, ...]:
    """What the names of a block's tensors begin with that belong to modules of ours."""
    return tuple(f"{path}." if path else "" for path in result.modules)
