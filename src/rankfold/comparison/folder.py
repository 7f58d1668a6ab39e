"""The folder of a comparison: what is finished stays, whatever happens to the process.

``compare.json`` says what the rows have in common and which were asked for; ``cells/KEY.json`` is a row that is done or
has failed, written in one step. Beside it lies, while it is worked on, the compressed checkpoint of the row. All else
in the folder is made out of these files.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .._utils.files import check_name, check_output, read_json, sweep, write_json, writing
from .._utils.locking import lock_of, locked
from .._utils.schema import NUMBER, Each, Maybe, check_record
from ..data.calibration_data import upgrade_calibration
from ..errors import CheckpointError
from ..report.record import PROBE_TEXTS
from .grid import Cell

CONFIG, CELLS, DENSE = "compare.json", "cells", "dense"
MOMENTS = "moments-"  # how their names begin
FILE = {
    "identity": {
        "base_model": str,
        "dtype": str,
        "calibration": {"num_samples": int, "max_length": int},
        "measures": dict,
    },
    "runs": [{"methods": [str], "sparsities": [NUMBER]}],
    "rows": [str],
}
ROW = {
    "label": str,
    "status": str,
    "error": Maybe(str),
    "sparsity": NUMBER,
    "mode": Maybe(str),
    "counts": Maybe({"sparsity": NUMBER, "parameters": int, "bytes": int, "kv_bytes_per_token": int}),
    "excess": Maybe(str),
    "modules": [{"block": int, "module": str, "rank": int, "of": int, "weights": int, "dense_weights": int}],
    "measures": Maybe({"texts": [{"text": str, "perplexity": NUMBER}]}),
    "probe_texts": PROBE_TEXTS,
    "versions": Each(str),
}


class Folder:
    """Rows of one comparison.

    Args:
        path: need not exist.
        identity: what all rows have in common; a folder of another one is refused.
    """

    def __init__(self, path: Path, identity: dict):
        self.path, self.identity = path, identity

    @contextlib.contextmanager
    def working(self, cells: Sequence[Cell]) -> Iterator[None]:
        """Keep the folder to this process, and note which rows are wanted now.

        Raises:
            CheckpointError: it holds something else or another comparison, another process writes it, or it cannot be
                written.
        """
        if os.path.lexists(self.path):
            check_name(self.path)
        else:
            check_output(self.path)
        with locked(lock_of(self.path), self.path):
            found = self._found()
            with writing(self.path):
                (self.path / CELLS).mkdir(parents=True, exist_ok=True)
                sweep(self.path / CELLS)
            write_json(self.path / CONFIG, _extended(found, cells))
            yield

    def _found(self) -> dict:
        """``compare.json``, or a first one."""
        path = self.path / CONFIG
        if not os.path.lexists(self.path) or (self.path.is_dir() and not any(self.path.iterdir())):
            return {"identity": self.identity, "runs": [], "rows": [DENSE]}
        if not path.exists():
            raise CheckpointError(f"{self.path} exists and is not a comparison; choose another folder")
        found = read_config(path)
        if found["identity"] != self.identity:
            other = [key for key in self.identity if found["identity"].get(key) != self.identity[key]]
            raise CheckpointError(
                f"{self.path} holds a comparison of another model, text or setting; choose another folder (it differs "
                f"in: {', '.join(sorted(other)) or 'what it lacks'})"
            )
        return found

    def config(self) -> dict:
        """Return what is in ``compare.json``."""
        return read_config(self.path / CONFIG)

    def rows(self) -> list[dict]:
        """Every row there is, in the order they were asked for; the dense model first.

        Of what an earlier version, with other defaults, has called by the same name the last one counts.
        """
        found = [self.row(key) for key in self.config()["rows"] if self._row(key).exists()]
        return list({(row["label"], row["sparsity"]): row for row in found}.values())

    def row(self, key: str) -> dict:
        """One row.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        row = read_json(self._row(key), self._row(key))
        check_record(row, ROW, self._row(key))
        return row

    def done(self, key: str) -> bool:
        """Whether a row is there; one that failed is tried again."""
        return self._row(key).exists() and self.row(key)["status"] == "done"

    def all_done(self, keys: Iterable[str]) -> set[str]:
        """Return which of these rows are there."""
        return {key for key in keys if self.done(key)}

    def keep(self, key: str, row: dict) -> None:
        """Make a row durable."""
        write_json(self._row(key), row)

    def checkpoint(self, key: str) -> Path:
        """Where the compressed model of a row goes."""
        return self.path / CELLS / key

    def moments(self, statistics: set[str]) -> Path:
        """Where moments that rows share go."""
        names = hashlib.sha256(",".join(sorted(statistics)).encode()).hexdigest()[:8]
        return self.path / CELLS / f"{MOMENTS}{names}"

    def kept(self) -> set[str]:
        """Names of the models of finished rows, and of the moments beside them: a command that kept them is through."""
        folders = {path.name for path in (self.path / CELLS).iterdir() if path.is_dir()}
        moments = {name for name in folders if name.startswith(MOMENTS)}
        models = {name for name in folders - moments if self.done(name)}
        return models | moments if models else set()

    def clear(self, kept: set[str], cells: Sequence[Cell] | None = None) -> None:
        """Remove the models of ``cells`` but for those ``kept``; ``None``: all, what is unfinished, the moments."""
        with writing(self.path):
            for path in sorted((self.path / CELLS).iterdir()):
                if path.is_dir() and path.name not in kept and (cells is None or path.name in {c.key for c in cells}):
                    shutil.rmtree(path)

    def _row(self, key: str) -> Path:
        return self.path / CELLS / f"{key}.json"


def read_config(path: Path) -> dict:
    """Return what is in ``compare.json``.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    found = read_json(path)
    if isinstance(found, dict) and "identity" in found:
        found |= {"identity": upgrade_calibration(found["identity"])}
    check_record(found, FILE, path)
    return found


def _extended(found: dict, cells: Sequence[Cell]) -> dict:
    """``compare.json`` with the rows of one more command."""
    run = {
        "methods": list(dict.fromkeys(cell.label for cell in cells)),
        "sparsities": list(dict.fromkeys(cell.method.sparsity for cell in cells)),
    }
    runs = found["runs"] + ([] if run in found["runs"] else [run])
    return found | {"runs": runs, "rows": list(dict.fromkeys([*found["rows"], *(cell.key for cell in cells)]))}
