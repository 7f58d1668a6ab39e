"""Give memory back between blocks."""

import ctypes
import ctypes.util
import functools
import sys

__all__ = ["release_memory"]


@functools.cache
def _trim():
    """glibc's ``malloc_trim``, where the C library has it."""
    name = ctypes.util.find_library("c") if sys.platform == "linux" else None
    return getattr(ctypes.CDLL(name), "malloc_trim", None) if name else None


def release_memory() -> None:
    """Return freed heap pages to the system.

    Blocks come and go by the hundred megabytes. glibc keeps what was freed on its heap, so that without this the resident
    set grows with the number of blocks instead of staying at one.
    """
    trim = _trim()
    if trim is not None:
        trim(0)
