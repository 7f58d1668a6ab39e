"""Where attacks happen, and what became of one."""

import contextlib
import io
import os
import random
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

from rankfold.cli import main
from saved import save_text, save_tiny

from .lines import USUAL, hostile_line
from .mutations import mutate_bytes, mutate_json

KINDS = ("command lines", "records", "moments", "checkpoints")
SECONDS = 60  # a case that takes longer hangs


class Outcome(NamedTuple):
    """One case."""

    verdict: str  # see VERDICTS
    case: str
    detail: str


VERDICTS = {
    "done": "exit code 0; where only moments were damaged, with the very weights that undamaged ones give",
    "refused": "exit code 2, one line of reason, nothing left",
    "traceback": "an exception that is not explained",
    "messy": "refused, but not in one line, or something is left",
    "wrong": "exit code 0, and other weights than undamaged moments give",
    "hangs": f"more than {SECONDS} s",
}
HELD = ("done", "refused")


class _Slow(BaseException):
    pass


class Arena:
    """A folder with a model, a text, moments and a compressed checkpoint, all tiny; a case gets a copy.

    Args:
        folder: to work in; must not exist.
    """

    def __init__(self, folder: Path):
        self.folder, self.stock = folder, folder / "stock"
        self.stock.mkdir(parents=True)
        save_tiny(self.stock / "model", blocks=2)
        save_text(self.stock / "text.txt")
        for line in (["calibrate", *USUAL["calibrate"]], ["compress", *USUAL["compress"]], self.from_moments):
            name = {"calibrate": "moments"}.get(line[0], "true" if "--moments" in line else "small")
            code, err = call(self.stock, [name if word == "out" else word for word in line])
            assert code == 0, err

    from_moments = ("compress", "model", "-o", "out", "--moments", "moments", "--multiple", "2", "--device", "cpu")

    def attack(self, kind: str, seed: int) -> Outcome:
        """One case; the same arguments give the same case."""
        rng, place = random.Random(f"{kind} {seed}"), self.folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.stock, place)
        line, what = getattr(self, f"_{kind.replace(' ', '_')}")(place, rng)
        before = set(os.listdir(place))
        case = f"{kind} {seed}: {' '.join(line)!a}{what and f' ({what})'}"
        try:
            code, err = call(place, line)
        except _Slow:
            return Outcome("hangs", case, "")
        except Exception as error:
            ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "rankfold" in frame.filename]
            where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
            return Outcome("traceback", case, f"{where}: {type(error).__name__}: {str(error)[:300]!a}")
        left = {name for name in set(os.listdir(place)) - before if not _is_unfinished(place / name)}
        if code == 0:
            wrong = kind == "moments" and "out" in left and _weights(place / "out") != _weights(place / "true")
            return Outcome("wrong" if wrong else "done", case, "")
        reasons = [row for row in err.splitlines() if row.startswith("rankfold: ")]
        fine = code == 2 and len(reasons) == 1 and err.splitlines()[-1] == reasons[0] and not left
        return Outcome("refused" if fine else "messy", case, f"exit code {code}, left {sorted(left)}: {err[-300:]!a}")

    def _command_lines(self, place: Path, rng) -> tuple[list[str], str]:
        return hostile_line(rng), ""

    def _records(self, place: Path, rng) -> tuple[list[str], str]:
        what = _damage(place / "small" / "rankfold.json", rng, mutate_json)
        return ["inspect", "small", *rng.choice([[], ["--json"]])], what

    def _moments(self, place: Path, rng) -> tuple[list[str], str]:
        files = sorted((place / "moments").iterdir())
        file = rng.choice(files)
        how = rng.choice(["content", "content", "content", "removed", "another", "folder"])
        if how == "content":
            what = _damage(file, rng, mutate_json if file.suffix == ".json" else mutate_bytes)
        else:
            other = rng.choice(files).read_bytes()
            file.unlink()
            {"removed": lambda: None, "another": lambda: file.write_bytes(other), "folder": file.mkdir}[how]()
            what = f"{file.name} {how}"
        return list(self.from_moments), what

    def _checkpoints(self, place: Path, rng) -> tuple[list[str], str]:
        folder = place / rng.choice(["model", "small"])
        file = rng.choice(sorted(folder.iterdir()))
        what = f"{folder.name}: " + _damage(file, rng, mutate_json if file.suffix == ".json" else mutate_bytes)
        command = "compress" if folder.name == "model" else rng.choice(["evaluate", "generate"])
        return [command, *USUAL[command]], what


def _damage(file: Path, rng, mutate) -> str:
    content, what = mutate(file.read_bytes(), rng)
    file.write_bytes(content)
    return f"{file.name}: {what}"


def _is_unfinished(path: Path) -> bool:
    """Blocks that were done before the error are kept, and cannot be taken for a result."""
    return path.name.endswith(".partial") and any(path.glob("block-*.json"))


def _weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def call(place: Path, arguments) -> tuple[int, str]:
    """``rankfold ARGUMENTS`` in a folder, in this process: exit code and stderr."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=e) for e in ("strict", "backslashreplace")]
    here, argv = os.getcwd(), sys.argv
    sys.argv = ["rankfold", *arguments]
    os.chdir(place)
    signal.signal(signal.SIGALRM, _slow)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            main()
    except SystemExit as stop:
        code = stop.code
    finally:
        signal.alarm(0)
        os.chdir(here)
        sys.argv = argv
    streams[1].flush()
    return code, streams[1].buffer.getvalue().decode("utf-8", "backslashreplace")


def _slow(*_):
    raise _Slow
