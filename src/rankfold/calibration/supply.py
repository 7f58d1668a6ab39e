"""Where the moments of the next block come from while blocks are compressed one after the other."""

from ..architectures import BlockView
from .moments import BlockMoments
from .runner import Stream, advance, measure
from .store import MomentStore

__all__ = ["FromStore", "FromStream"]


class FromStore:
    """Moments of the dense model that are there already."""

    def __init__(self, moments: MomentStore):
        self.moments = moments

    def take(self, view: BlockView, statistics: set[str]) -> BlockMoments:
        """Moments of a dense block."""
        return dict(self.moments[view.index])

    def skip(self, view: BlockView) -> None:
        """Go past a dense block whose moments nobody needs."""

    def follow(self, view: BlockView) -> None:
        """Go past a compressed block."""


class FromStream:
    """Moments measured on a stream that goes through compressed blocks (sequential) or through dense ones (one pass)."""

    def __init__(self, stream: Stream, *, sequential: bool):
        self.stream, self.sequential = stream, sequential

    def take(self, view: BlockView, statistics: set[str]) -> BlockMoments:
        """Moments of a dense block; one pass gives them as a store would."""
        moments = measure(view, self.stream, statistics, step=not self.sequential)
        return moments if self.sequential else {name: moment.rounded() for name, moment in moments.items()}

    def skip(self, view: BlockView) -> None:
        """Go past a dense block whose moments nobody needs."""
        if not self.sequential:
            advance(view, self.stream)

    def follow(self, view: BlockView) -> None:
        """Go past a compressed block."""
        if self.sequential:
            advance(view, self.stream)
