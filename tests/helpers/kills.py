"""What a process leaves behind that is killed at its k-th file operation, for every k.

A killed process leaves what is on the disk and nothing else. So one run is enough: an audit hook hears of every
operation that Python makes below a folder, whoever makes it (what safetensors writes is heard of at the call), and
keeps what is there before it, and where bytes are written, what is there after half of them. Operations that change
nothing on the disk share a state.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import transformers

from rankfold._utils import files

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.link", "os.symlink", "os.truncate"}
HALF = b'{"half'

State = dict[str, bytes | None]  # path below the folder -> content; None for a folder


def read_state(folder: Path) -> State:
    """Everything below a folder."""
    found = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): None if p.is_dir() else p.read_bytes() for p in found}


def write_state(folder: Path, state: State) -> None:
    """Put a state on the disk."""
    folder.mkdir()
    for name, content in sorted(state.items()):
        (folder / name).mkdir() if content is None else (folder / name).write_bytes(content)


class Kills:
    """The states below ``folder`` at all operations, in order, with the operation that would have come next."""

    def __init__(self, folder: Path):
        self.folder, self.operations, self.states = folder.resolve(), 0, {}

    def by_names(self) -> list[tuple[State, str]]:
        """Return one of the states that differ in temporary files alone, which nothing reads: a half one, if any."""
        chosen: dict[tuple, tuple[State, str]] = {}
        for items, what in self.states.items():
            named = tuple(item for item in items if not item[0].endswith(".tmp"))
            if named not in chosen or HALF in dict(items).values():
                chosen[named] = dict(items), what
        return list(chosen.values())

    def step(self, what: str, half: dict[str, bytes] | None = None) -> None:
        """A kill before an operation, or with ``half`` in the middle of one."""
        self.operations += 1
        state = read_state(self.folder) | (half or {})
        self.states.setdefault(tuple(state.items()), what)

    def hear(self, event: str, arguments: tuple) -> None:
        """Called by Python before it does anything to a file."""
        if not arguments or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = Path(os.path.abspath(os.fsdecode(arguments[0])))
        in_tree = event in ("os.remove", "os.rmdir") and arguments[1] != -1  # rmtree names what is below a descriptor
        if not path.is_relative_to(self.folder) and not in_tree:
            return
        if event in CHANGES:
            self.step(f"{event} {path.name}")
        elif event == "open" and arguments[2] & WRITES:
            self.write(path, b"" if arguments[2] & os.O_EXCL else HALF, begins=arguments[2] & (os.O_CREAT | os.O_TRUNC))

    def write(self, path: Path, half: bytes = HALF, begins: int = 1) -> None:
        """An open for writing; where it ``begins`` a file, a kill in the middle leaves half of it."""
        self.step(f"open {path.name}")
        if begins:
            self.step(f"write {path.name}", {str(path.relative_to(self.folder)): half})


_listening: Kills | None = None


def _hook(event: str, arguments: tuple) -> None:
    if _listening is not None and (event == "open" or event in CHANGES):
        _listening.hear(event, arguments)


@functools.cache
def _listen() -> None:
    """Hear of operations from now on. A hook cannot be removed; every attribute that torch looks up calls it."""
    sys.addaudithook(_hook)


def kill_everywhere(folder: Path, work: Callable, monkeypatch) -> Kills:
    """Run ``work()``, which writes below ``folder``, and keep what a kill at any of its operations leaves there."""
    global _listening
    _listen()
    kills = Kills(folder)

    def save_file(tensors, path, metadata=None):
        kills.write(Path(os.path.abspath(path)))
        safetensors.torch.save_file(tensors, path, metadata=metadata)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: kills.step("fsync"))
        patch.setattr(files, "save_file", save_file)
        patch.setattr(transformers.modeling_utils, "safe_save_file", save_file)
        _listening = kills
        try:
            work()
        finally:
            _listening = None
    kills.step("the end")
    return kills
