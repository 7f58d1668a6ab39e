"""Durable writes: a file is either whole or not there."""

import json
import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .errors import CheckpointError

__all__ = ["check_output", "read_json", "sync_folder", "write_json", "write_tensors", "write_text"]


def check_output(output: Path) -> None:
    """Raise :class:`CheckpointError` if ``output`` cannot become a new folder."""
    if output.exists():
        raise CheckpointError(f"{output} exists already; choose another folder or remove it")
    if not output.parent.is_dir():
        raise CheckpointError(f"{output.parent} is not a folder; make it first")


def _finish(temporary: Path, path: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(temporary, 0o666 & ~umask)  # safetensors makes files only their owner can read
    with open(temporary, "r+b") as handle:  # Windows syncs only what is open for writing
        os.fsync(handle.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _guard(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot write {path}: {error.strerror or error}; free space or choose another folder")


def write_text(path: Path, text: str) -> None:
    """Write text, fsync, rename."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(text.encode("utf-8", "surrogateescape"))
        _finish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _guard(path, error) from error


def write_json(path: Path, value) -> None:
    """Write JSON with a stable layout."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict:
    """Read JSON.

    Raises:
        CheckpointError: missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is missing or damaged ({error})") from error


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, fsync, rename."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(ready, temporary, metadata=metadata)
        _finish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _guard(path, error) from error
    except SafetensorError as error:  # how safetensors reports a full disk
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {error}; free space or choose another folder") from error
