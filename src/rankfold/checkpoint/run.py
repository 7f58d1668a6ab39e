"""The folder of a run: a killed run can go on, and nothing unfinished looks finished.

While a run is under way everything lies in ``OUT.partial``: its configuration, its finished blocks, and what was
measured there. When all is written and checked, removing ``run.json`` declares the rest to be the checkpoint; what
belonged to the run is cleared away and the folder renamed to ``OUT``. A kill or an error before that removal leaves a
run to go on with, a kill after it a checkpoint that lacks its name only: clearing and renaming can be repeated.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from .._utils.files import check_output, read_json, sweep, sync_files, sync_folder, write_json, write_text, writing
from .._utils.locking import lock_of, locked
from .._utils.processes import from_first, is_first
from .._utils.stopwatch import go_on_from, seconds_so_far
from ..data.calibration_data import upgrade_calibration
from ..errors import CheckpointError
from ..modules import CODE_FILE, code
from .load import described
from .shards import write_around

CONFIG, RECORD = "run.json", "rankfold.json"
KEPT = ("block-", "model-", "checkpoint-")  # blocks, shards, states of a recovery


class RunFolder:
    """The folder a compression writes to.

    Args:
        output: the final folder; must not exist.
        identity: configuration of the run; an unfinished run is continued only if it is equal. Under ``before``, that
            of another component of the model, which is compressed first.

    Attributes:
        path: where everything lies until the run is done.
        moments, gradients, costs, times: where measurements are kept until then.
        seconds: where the seconds of the run so far are kept.
        before: where the component that is compressed first lies until then, in a folder of its name.
    """

    def __init__(self, output: str | Path, identity: dict):
        self.output, self.identity = Path(output), identity
        self.path = self.output.with_name(self.output.name + ".partial")
        self.moments, self.gradients, self.before = (self.path / name for name in ("moments", "gradients", "before"))
        self.costs, self.times = self.path / "costs.json", self.path / "times.json"
        self.seconds = self.path / "seconds.json"

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Keep the folder to this process; of several that share a run, to the first, which alone writes.

        Raises:
            CheckpointError: the output exists, holds an unfinished run of another configuration, is written by another
                process, or cannot be written.
        """
        if not is_first():
            yield
            return
        check_output(self.output)
        with locked(lock_of(self.output), self.output):
            check_output(self.output)  # the process that had the lock may just have finished
            with writing(self.path):
                self._claim()
            try:
                yield
            except Exception:
                with contextlib.suppress(OSError):  # the error is what to tell
                    self._remove_if_empty()
                raise

    def _claim(self) -> None:
        found = self._found()
        if found is not None and found != self.identity:
            raise CheckpointError(
                f"{self.path} is an unfinished run of another configuration ({difference(found, self.identity)}); "
                "repeat that one to go on with it, remove the folder to start anew, or choose another output"
            )
        self.path.mkdir(exist_ok=True)
        sweep(self.path)
        if found is None:
            write_json(self.path / CONFIG, self.identity)

    def _found(self) -> dict | None:
        """Return the configuration of what lies in the folder; ``None`` where nothing does."""
        if not os.path.lexists(self.path):
            return None
        if (self.path / CONFIG).exists():
            return upgrade_calibration(read_json(self.path / CONFIG, self.path))
        if self.complete:
            return _identified(upgrade_calibration(read_json(self.path / RECORD, self.path)), self.identity)
        if not self.path.is_dir() or {path.name for path in self.path.iterdir()} - {f"{CONFIG}.tmp"}:
            raise CheckpointError(
                f"{self.path} exists and is not an unfinished run; remove it or choose another output"
            )
        return None

    @property
    def complete(self) -> bool:
        """Whether all is written and checked; :meth:`publish` is what is left to do."""
        return (self.path / RECORD).exists() and not (self.path / CONFIG).exists()

    @property
    def published(self) -> bool:
        """Whether the output is what this very run has written."""
        record = self.output / RECORD
        found = upgrade_calibration(read_json(record)) if record.exists() else {}
        return _identified(found, self.identity) == self.identity

    @property
    def earlier(self) -> dict | None:
        """Record of the component that was compressed first, once it is done."""
        found = sorted(self.before.glob(f"*/{RECORD}"))
        return upgrade_calibration(read_json(found[0], self.path)) if found else None

    def _remove_if_empty(self) -> None:
        """Remove a run that ended in an error where nothing in it is worth keeping."""
        if self.complete or any(path.name.startswith(KEPT) for path in self.path.rglob("*")):
            return
        self._clear_away()
        sweep(self.path)
        (self.path / CONFIG).unlink()  # last: a folder without it is not taken for a run
        shutil.rmtree(self.path)

    def _clear_away(self) -> None:
        for folder in (self.moments, self.gradients, self.before):
            if folder.exists():
                shutil.rmtree(folder)
        for path in (self.costs, self.times, self.seconds):
            path.unlink(missing_ok=True)

    def keep_seconds(self) -> None:
        """Leave the seconds so far to the next process, if this one is killed."""
        with writing(self.path):
            write_json(self.seconds, seconds_so_far())

    def go_on_counting(self) -> None:
        """Add the seconds that earlier processes left."""
        if kept := from_first(lambda: read_json(self.seconds, self.path) if self.seconds.exists() else None):
            go_on_from(kept)

    def write_rest(self, source, config, card: str, record: dict) -> dict:
        """Write what is not weights, and declare the folder to be complete.

        Returns:
            The record as it was written, with the seconds that the run took.
        """
        with writing(self.path):
            write_around(self.path, source, config)
            if described(config) is not None:
                write_text(self.path / CODE_FILE, code())
            write_text(self.path / "README.md", card)
            record = record | {"run": {"seconds": seconds_so_far()} | record["run"]}
            write_json(self.path / RECORD, record)
            sync_files(self.path)
            (self.path / CONFIG).unlink()
        return record

    def publish(self) -> Path:
        """Clear away what belonged to the run and rename the folder to the output."""
        with writing(self.path):
            for path in [*sorted(self.path.glob("block-*.json")), *self.path.glob("basis-*.safetensors")]:
                path.unlink()
            self._clear_away()
            sync_folder(self.path)
        if os.path.lexists(self.output):
            raise CheckpointError(
                f"{self.output} appeared while the run was under way; the finished checkpoint is {self.path}: rename "
                f"it, or remove {self.output} and give the same command again"
            )
        with writing(self.output):
            os.rename(self.path, self.output)
            sync_folder(self.output.resolve().parent)
        return self.output


def _identified(record: dict, identity: dict) -> dict:
    """Return what a record has in place of an identity."""
    found = {key: record.get(key) for key in identity}
    if "before" in identity and isinstance(found["before"], dict):
        found["before"] = _identified(found["before"], identity["before"])
    return found


def difference(found: dict, wanted: dict, name: str = "") -> str:
    """Name the first setting in which two configurations differ."""
    for key in [*wanted, *found]:
        one, other = found.get(key), wanted.get(key)
        if one != other:
            path = f"{name}.{key}" if name else key
            if isinstance(one, dict) and isinstance(other, dict):
                return difference(one, other, path)
            return f"its {path} is {str(one)[:40]}, not {str(other)[:40]}"
    return "it is damaged"
