"""One cheap reading of a GGUF file for all that open it: its vocabulary is parsed token by token."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from .._utils.extras import require


@contextmanager
def parsed_once() -> Iterator[None]:
    """Let everything that opens a GGUF file inside share one reader and one table of names.

    transformers opens it for the config, for the weights and for the tokenizer, and makes the table of names anew for
    every module of the model; both are imported at every call.

    Raises:
        OptionError: the package gguf is not installed.
    """
    require("gguf", "a .gguf file")
    import gguf

    class PlainReader(gguf.GGUFReader):
        """Reads slices of a plain array: those of a memory map are objects of Python, one for every token."""

        def __setattr__(self, name, value):
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    shared = functools.cache(PlainReader)
    gguf.GGUFReader = lambda path, mode="r": shared(str(path), mode)
    gguf.get_tensor_name_map = functools.cache(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, names
