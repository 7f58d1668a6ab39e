"""The residual streams of some windows, as one compression needs them.

A method may be fitted to what the dense model sends (one pass), to what the compressed blocks send (sequential), or to the
difference of both: then two streams of the same tokens run side by side.
"""

from ..architectures import BlockView
from .moments import BlockMoments
from .observers import DenseBatch
from .runner import Stream, advance, advance_dense, measure

__all__ = ["HiddenStates"]


class HiddenStates:
    """The compressed stream of some windows and, where it is asked for, the dense one beside it.

    For every block: :meth:`enter` it while it is dense, :meth:`measure` as often as there are stages, :meth:`follow` it when
    it is compressed.

    Args:
        small: the stream that goes through compressed blocks.
        dense: another one of the same windows, which goes through dense blocks; ``None`` where nothing compares the two.
    """

    def __init__(self, small: Stream, dense: Stream | None = None):
        self.small, self.dense = small, dense
        self._beside: list[DenseBatch] | None = None

    def enter(self, view: BlockView) -> None:
        """Go through the dense block."""
        if self.dense is not None:
            self._beside = advance_dense(view, self.dense)

    def measure(self, view: BlockView, statistics: set[str]) -> BlockMoments:
        """Moments of the block as it is now, on what the compressed blocks before it send."""
        return measure(view, self.small, statistics, step=False, dense=self._beside)

    def follow(self, view: BlockView) -> None:
        """Go through the compressed block."""
        self._beside = None
        advance(view, self.small)
