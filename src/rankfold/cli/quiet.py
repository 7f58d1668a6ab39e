"""Keep the messages and progress bars of other libraries out of a command's output."""

import functools
import sys

__all__ = ["quiet_libraries"]


def quiet_libraries() -> None:
    """Show errors of transformers only, and no progress bars of loaders where stderr is a file."""
    import transformers
    from tqdm import tqdm

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not sys.stderr.isatty():
        # tqdm has read TQDM_DISABLE when it was imported.
        tqdm.__init__ = functools.partialmethod(tqdm.__init__, disable=True)
