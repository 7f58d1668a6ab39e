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
from rankfold.data.text import read_text
from saved import save_text, save_tiny

from .lines import FITTING, USUAL, hostile_line, spoken
from .mutations import mutate_bytes, mutate_json, mutate_settings, mutate_tensors
from .numbers import computed, may_change, same
from .texts import FIELDS, ROWS, UNKNOWN, hostile_text

KINDS = ("command lines", "records", "moments", "checkpoints", "texts")
SECONDS = 60  # of the processor: a case that takes longer hangs
WAITING = 600  # of a clock, as other work may be beside it
CHECKPOINTS = ("model", "tied", "small", "latent")
FINISHED = {"recover": 3, "compress": 3, "compare": 1}  # training that was undone; a row that could not be done
LATENT = ("--rank-multiple", "2", "--set", "sparse=0.2", "--set", "bits=6")


class Outcome(NamedTuple):
    """One case."""

    verdict: str  # see VERDICTS
    case: str
    detail: str


VERDICTS = {
    "done": "exit code 0, 3 where training was undone, 1 where a comparison has a row that could not be done; damaged "
    "moments and checkpoints gave the numbers that undamaged ones give, a text was read as it was written",
    "another": "exit code 0 and other numbers, of what is another checkpoint now and no damaged one; see below",
    "refused": "exit code 2, one line of reason, nothing left",
    "traceback": "an exception that is not explained",
    "messy": "refused, but not in one line, or something is left",
    "wrong": "exit code 0, and numbers or a text that the files do not give",
    "hangs": f"more than {SECONDS} s of the processor, or {WAITING} s in all",
}
HELD = ("done", "another", "refused")


class _Slow(BaseException):
    pass


class Arena:
    """A folder with models, a text, moments and compressed checkpoints, all tiny; a case gets a copy.

    Args:
        folder: to work in; must not exist.
    """

    def __init__(self, folder: Path):
        self.folder, self.stock = folder, folder / "stock"
        self.stock.mkdir(parents=True)
        save_tiny(self.stock / "model", blocks=2)
        save_tiny(self.stock / "tied", blocks=2, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
        save_text(self.stock / "text.txt")
        self._call("calibrate", "model", "-o", "moments", *FITTING)
        self._call("compress", "model", "-o", "small", "--rank-multiple", "2", *FITTING)
        self._call("compress", "tied", "-o", "latent", "--method", "latentllm", *LATENT, *FITTING)
        self._call(*("true" if word == "out" else word for word in self.from_moments))
        self.numbers = {name: computed(self.stock / name) for name in CHECKPOINTS}

    def _call(self, *line: str) -> None:
        code, err = call(self.stock, [*line, "--device", "cpu"] if "--device" not in line else line)
        assert code == 0, err

    from_moments = (
        *("compress", "model", "-o", "out", "--method", "modegpt", "--moments", "moments", "--rank-multiple", "2"),
        *("--device", "cpu"),
    )

    def attack(self, kind: str, seed: int) -> Outcome:
        """One case; the same arguments give the same case."""
        rng, place = random.Random(f"{kind} {seed}"), self.folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.stock, place)
        line, what, judge = getattr(self, f"_{kind.replace(' ', '_')}")(place, rng)
        before = set(os.listdir(place))
        case = f"{kind} {seed}: {' '.join(line)!a}{what and f' ({what})'}"
        try:
            code, err = call(place, line, spoken(rng))
        except _Slow:
            return Outcome("hangs", case, "")
        except Exception as error:
            ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "rankfold" in frame.filename]
            where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
            return Outcome("traceback", case, f"{where}: {type(error).__name__}: {str(error)[:300]!a}")
        left = {name for name in set(os.listdir(place)) - before if not _is_unfinished(place / name)}
        if code in (0, FINISHED.get(line[0])):
            return Outcome(judge() if judge else "done", case, "")
        reasons = [row for row in err.splitlines() if row.startswith("rankfold: ")]
        fine = code == 2 and len(reasons) == 1 and err.splitlines()[-1] == reasons[0] and not left
        return Outcome("refused" if fine else "messy", case, f"exit code {code}, left {sorted(left)}: {err[-300:]!a}")

    # Of every kind: a command line, what is hostile about it, and, if that can be told, whether 0 was right.

    def _command_lines(self, place: Path, rng):
        return hostile_line(rng), "", None

    def _records(self, place: Path, rng):
        what = _damage(place / "small" / "rankfold.json", rng, mutate_json)
        return ["inspect", "small", *rng.choice([[], ["--json"]])], what, None

    def _moments(self, place: Path, rng):
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

        def judge() -> str:
            return "done" if _weights(place / "out") == _weights(place / "true") else "wrong"

        return list(self.from_moments), what, judge

    def _checkpoints(self, place: Path, rng):
        name = rng.choice(CHECKPOINTS)
        folder = place / name
        file = rng.choice(sorted(folder.iterdir()) + [*folder.glob("*.safetensors"), folder / "config.json"] * 3)
        mutate = {".json": mutate_json, ".safetensors": rng.choice([mutate_bytes, mutate_tensors])}.get(
            file.suffix, mutate_bytes
        )
        if file.name == "config.json":
            mutate = rng.choice([mutate_json, mutate_settings, mutate_settings])
        what = f"{name}: " + _damage(file, rng, mutate)
        command = rng.choice(
            ["evaluate", "generate"] if name in ("small", "latent") else ["compress"] * 3 + ["evaluate"]
        )
        line = [command, *(name if word in ("model", "small") else word for word in USUAL[command])]

        def judge() -> str:
            numbers = computed(folder, by_block=command == "compress")
            if same(numbers, self.numbers[name]):
                return "done"
            return "another" if may_change(folder, self.stock / name, file.name, numbers) else "wrong"

        return line, what, judge

    def _texts(self, place: Path, rng):
        field, command = rng.choice(FIELDS), rng.choice(["calibrate", "compress", "evaluate"])
        text = hostile_text(place, rng, field)
        line = [command, *(text.name if word == "text.txt" else word for word in USUAL[command])]
        if text.name.lower().endswith(ROWS):  # where there are columns to choose from
            line += ["--text-column", field]
        if command == "evaluate":
            at = line.index("--limit")
            del line[at : at + 2]  # the whole text

        def judge() -> str:
            read = read_text(str(place / text.name), column=field).documents
            return "done" if text.rows in (UNKNOWN, read) else "wrong"

        return line, text.what, judge


def _damage(file: Path, rng, mutate) -> str:
    content, what = mutate(file.read_bytes(), rng)
    file.write_bytes(content)
    return f"{file.name}: {what}"


def _is_unfinished(path: Path) -> bool:
    """Blocks that were done before the error are kept, and cannot be taken for a result."""
    return path.name.endswith(".partial") and any(path.glob("block-*.json"))


def _weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def call(place: Path, arguments, typed: bytes = b"") -> tuple[int, str]:
    """``rankfold ARGUMENTS`` in a folder, in this process, with ``typed`` on stdin: exit code and stderr."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=e) for e in ("strict", "backslashreplace")]
    here, argv, stdin = os.getcwd(), sys.argv, sys.stdin
    sys.argv, sys.stdin = ["rankfold", *arguments], io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8")
    os.chdir(place)
    for name in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(name, _slow)
    signal.alarm(WAITING)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            main()
    except SystemExit as stop:
        code = stop.code
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.chdir(here)
        sys.argv, sys.stdin = argv, stdin
    streams[1].flush()
    return code, streams[1].buffer.getvalue().decode("utf-8", "backslashreplace")


def _slow(*_):
    raise _Slow
