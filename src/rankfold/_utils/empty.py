"""Build models that have no weights yet."""

import contextlib
from collections.abc import Generator

from accelerate import init_empty_weights
from transformers.initialization import no_init_weights


@contextlib.contextmanager
def empty_weights() -> Generator[None]:
    """Give the models built inside parameters on the meta device, not tied, and buffers in memory.

    Nothing initialises the parameters: on the meta device PyTorch computes the shapes of random numbers in Python,
    which takes most of the time of building a model.
    """
    with no_init_weights(), init_empty_weights(include_buffers=False):
        yield
