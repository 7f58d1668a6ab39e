"""What attention mixes of every batch, kept while its queries, keys and values stay as they are.

Several passes go through a block whose attention is compressed: its output projection is fitted, then its MLP, and in
the end the block is followed. What the output projection receives is the same in all of them.
"""

import contextlib
from collections.abc import Iterator

from torch import Tensor

from ..modules.attention import CompressedAttention


class Mixed:
    """Has an attention compute what it mixes once for every batch.

    Args:
        attention: compressed; its output projection may change.
    """

    def __init__(self, attention: CompressedAttention):
        self.attention = attention
        self.batches: dict[int, Tensor] = {}  # number -> (B, T, H V)

    @contextlib.contextmanager
    def used(self, batch: int) -> Iterator[None]:
        """Have the attention give what is kept of a batch while that runs; the first time it is computed."""
        attention, mix = self.attention, self.attention.mix

        def kept(*args, **kwargs) -> tuple[Tensor, None]:
            if batch not in self.batches:
                self.batches[batch], _ = mix(*args, **kwargs)
            return self.batches[batch], None  # no block reads the weights

        attention.mix = kept
        try:
            yield
        finally:
            del attention.mix  # the class has it
