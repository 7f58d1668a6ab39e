"""Give memory back between blocks."""

import psutil


def release_memory() -> None:
    """Return freed heap pages to the system, where it takes them.

    Blocks come and go by the hundred megabytes. glibc keeps what was freed on its heap, so that without this the resident
    set grows with the number of blocks instead of staying at one.
    """
    if hasattr(psutil, "heap_trim"):  # not with musl, for example
        psutil.heap_trim()
