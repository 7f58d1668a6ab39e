"""One reading of a GGUF file for all that open it: its vocabulary is parsed token by token, in seconds."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from .._utils.extras import require


@contextmanager
def parsed_once() -> Iterator[None]:
    """Let everything that opens a GGUF file inside share one reader: transformers opens it for the config and for the weights.

    Raises:
        OptionError: the package gguf is not installed.
    """
    require("gguf", "a .gguf file")
    import gguf

    plain = gguf.GGUFReader
    shared = functools.cache(plain)
    gguf.GGUFReader = lambda path, mode="r": shared(str(path), mode)  # what transformers imports at every call
    try:
        yield
    finally:
        gguf.GGUFReader = plain
