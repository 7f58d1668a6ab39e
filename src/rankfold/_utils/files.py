"""Durable writes: a file is either whole or not there."""

import contextlib
import json
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import CheckpointError

TEMPORARY = ".tmp"  # what is being written; a kill may leave it behind


def check_output(output: Path, other: str = "folder") -> None:
    """Raise :class:`CheckpointError` if ``output`` cannot become a new folder; ``other``: what to choose instead."""
    check_name(output)
    try:
        if os.path.lexists(output):  # a link to nothing is in the way, too
            raise CheckpointError(f"{output} exists already; choose another {other} or remove it")
        if not output.parent.is_dir():
            raise CheckpointError(f"{output.parent} is not a folder; make it first")
        output.lstat()  # what lexists takes for "not there" may be a name that no file can have
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot use {output}: {reason}; choose another {other}") from error


def check_name(path: Path) -> None:
    """Raise :class:`CheckpointError` where safetensors, which takes UTF-8 only, could not read what was written."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"the name {str(path)!a} is not UTF-8; choose another one") from error


def own_name(path: Path) -> str:
    """Return the name of a file or folder, also of ``.``; that of a link and not of what it leads to, which in the
    hub's cache is a digest."""
    return Path(os.path.abspath(path)).name


def _finish(temporary: Path, path: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(temporary, 0o666 & ~umask)  # safetensors makes files only their owner can read
    _sync(temporary)
    os.replace(temporary, path)
    sync_folder(path.parent)


def _sync(path: Path) -> None:
    with open(path, "r+b") as handle:  # Windows syncs only what is open for writing
        os.fsync(handle.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_files(place: Path) -> None:
    """Make a file, or all that is in a folder, durable, whoever wrote it."""
    for path in [*sorted(place.rglob("*")), place]:
        (sync_folder if path.is_dir() else _sync)(path)


def copy_folder(folder: Path, to: Path) -> None:
    """Copy what is in a folder without its permissions: nothing could be added to the copy of a read-only one."""
    to.mkdir()
    for path in folder.iterdir():
        (copy_folder if path.is_dir() else shutil.copyfile)(path, to / path.name)


def sweep(folder: Path) -> None:
    """Remove what killed writes left behind."""
    for path in sorted(folder.rglob(f"*{TEMPORARY}")):
        path.unlink()


@contextlib.contextmanager
def writing(path: Path) -> Generator[None]:
    """One line for whatever stops a write, ours or a library's.

    Raises:
        CheckpointError: the disk is full, a folder is closed, ...
    """
    try:
        yield
    except Exception as error:
        # safetensors, torch.save and tokenizers report a full disk their own way; the last as a bare Exception
        of_torch = isinstance(error, RuntimeError) and "inline_container.cc" in str(error)
        if not (isinstance(error, OSError | SafetensorError) or of_torch or type(error) is Exception):
            raise
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write {path}: {reason}; free space or choose another folder") from error


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are not there.

    Raises:
        CheckpointError: a file has its name, the disk is full, ...
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _replacing(path: Path) -> Generator[Path]:
    """A temporary name to write to, which becomes ``path`` after the block; after an error nothing of it is left."""
    temporary = path.with_name(path.name + TEMPORARY)
    with writing(path):
        try:
            yield temporary
            _finish(temporary, path)
        except (OSError, SafetensorError):
            with contextlib.suppress(OSError):  # the first error is the one to tell
                temporary.unlink()
            raise


def write_text(path: Path, text: str) -> None:
    """Write text, fsync, rename."""
    # Names of files that are not UTF-8 reach Python as lone surrogates; as escapes JSON gives them back.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes, fsync, rename."""
    with _replacing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: object) -> None:
    """Write JSON with a stable layout."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, remove: Path | None = None) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        remove: the file, or the folder that is of no use without it, where the run that wrote it can begin again.

    Raises:
        CheckpointError: missing or damaged.
    """
    damaged = f"{path} is missing or damaged"
    advice = f"remove {remove} and start again" if remove else "copy or make it again"
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
            raise CheckpointError(f"{damaged} (it is not a file); remove it")
        value = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(value, allow_nan=False)  # Python reads NaN, which is no JSON
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{damaged} ({error}); {advice}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{damaged} (expected an object, got {type(value).__name__}); {advice}")
    return value


@contextlib.contextmanager
def reading_tensors(path: Path, remove: Path) -> Generator[None]:
    """One line for a safetensors file that cannot be read.

    Args:
        remove: the file, or the folder that is of no use without it.

    Raises:
        CheckpointError: missing or damaged.
    """
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); remove {remove} and start again") from error


def read_tensors(path: Path, remove: Path) -> dict[str, Tensor]:
    """Read a safetensors file onto the CPU; arguments and errors as for :func:`reading_tensors`."""
    with reading_tensors(path, remove):
        return load_file(path)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, fsync, rename."""
    with _replacing(path) as temporary:
        ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(ready, temporary, metadata=metadata)
