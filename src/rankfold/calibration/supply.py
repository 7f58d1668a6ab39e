"""Where the moments of the next block come from while blocks are compressed one after the other.

For every block the pipeline calls, in this order: ``enter`` while it is dense, ``take`` for each stage, ``follow`` when it is
compressed.
"""

from ..architectures import BlockView
from .moments import BlockMoments
from .runner import Stream, advance, measure
from .store import MomentStore
from .streams import HiddenStates

__all__ = ["FromDense", "FromStore", "FromStreams"]


class FromStore:
    """Moments of the dense model that are there already."""

    def __init__(self, moments: MomentStore):
        self.moments = moments

    def enter(self, view: BlockView, *, skip: bool) -> None:
        """Go through a dense block; ``skip``: nobody needs its moments."""

    def take(self, view: BlockView, statistics: set[str]) -> BlockMoments:
        """Moments of the block."""
        return dict(self.moments[view.index])

    def follow(self, view: BlockView) -> None:
        """Go through a compressed block."""


class FromDense:
    """Moments measured in one pass of the dense model; a store would give the same."""

    def __init__(self, stream: Stream):
        self.stream = stream

    def enter(self, view: BlockView, *, skip: bool) -> None:
        if skip:
            advance(view, self.stream)

    def take(self, view: BlockView, statistics: set[str]) -> BlockMoments:
        moments = measure(view, self.stream, statistics, step=True)
        return {name: moment.rounded() for name, moment in moments.items()}

    def follow(self, view: BlockView) -> None:
        pass


class FromStreams:
    """Moments measured on what the compressed blocks send, and perhaps beside the dense stream."""

    def __init__(self, streams: HiddenStates):
        self.streams = streams

    def enter(self, view: BlockView, *, skip: bool) -> None:
        self.streams.enter(view)

    def take(self, view: BlockView, statistics: set[str]) -> BlockMoments:
        return self.streams.measure(view, statistics)

    def follow(self, view: BlockView) -> None:
        self.streams.follow(view)
