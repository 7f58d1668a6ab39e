"""Keep the messages and progress bars of other libraries out of a command's output."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Show errors of transformers only, and no progress bars of loaders where stderr is a file."""
    import transformers

    from .._utils.progress import without_bars

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with contextlib.nullcontext() if sys.stderr.isatty() else without_bars():
        yield
