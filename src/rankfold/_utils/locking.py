"""One process at a time writes a folder."""

import contextlib
import json
import os
import platform
from collections.abc import Generator
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import CheckpointError
from .files import writing


def lock_of(output: Path) -> Path:
    """The lock file of a folder to be made; beside it, so that it never is in what was made."""
    return output.with_name(f".{output.name}.rankfold.lock")


@contextlib.contextmanager
def locked(path: Path, what: Path) -> Generator[None]:
    """Hold the lock file ``path`` while ``what`` is written.

    The system drops the lock of a process that dies; the file that stays behind is taken over by the next one.

    Raises:
        CheckpointError: another process holds it (named), or the file cannot be made.
    """
    lock = FileLock(path, thread_local=False)
    with writing(path):
        try:
            lock.acquire(blocking=False)
        except Timeout:
            if not path.exists():
                raise CheckpointError(
                    f"cannot lock {what}: no file can be made next to it, or another process has left it just now; "
                    "choose another folder, or give the command again"
                ) from None
            raise CheckpointError(
                f"{what} is being written by {_holder(path)}; wait until it is done or choose another folder"
            ) from None
    try:
        with writing(path):
            path.write_text(json.dumps({"pid": os.getpid(), "host": platform.node()}), encoding="utf-8")
        yield
    finally:
        try:
            with contextlib.suppress(OSError):  # Windows keeps what is open
                path.unlink()
        finally:
            lock.release()


def _holder(path: Path) -> str:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return f"process {facts['pid']} on {facts['host']}"
    except (OSError, ValueError, LookupError, TypeError):  # it has the lock and is about to write who it is
        return "another process"
