"""Keep the messages and progress bars of other libraries out of a command's output."""

import contextlib
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Show errors of transformers, gguf and the hub only, and no progress bars of loaders where stderr is a file.

    The hub's client tries five times and writes two lines a time; when it gives up, an error says so.
    """
    import huggingface_hub.utils.logging
    import transformers

    from .._utils.progress import without_bars

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.logging.set_verbosity_error()
    logging.getLogger("gguf").setLevel(logging.ERROR)  # of a Gemma it says that no file has a template for two texts
    with contextlib.nullcontext() if sys.stderr.isatty() else without_bars():
        yield
