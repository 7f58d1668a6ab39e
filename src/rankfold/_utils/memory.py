"""Host memory: what is free, and what is given back between blocks."""

import psutil


def release_memory() -> None:
    """Return freed heap pages to the system, where it takes them.

    Blocks come and go by the hundred megabytes. glibc keeps what was freed on its heap, so that without this the
    resident set grows with the number of blocks instead of staying at one.
    """
    if hasattr(psutil, "heap_trim"):  # not with musl, for example
        psutil.heap_trim()


def has_room(size: int) -> bool:
    """Tell whether ``size`` bytes fit into half of the host memory that is available now."""
    return size <= psutil.virtual_memory().available // 2
