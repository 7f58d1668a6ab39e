"""Where the moments of the next block come from while blocks are compressed one after the other.

For every block: ``enter`` it while it is dense, ``measure`` it once for every step, ``keep_mixed`` before the first one
that leaves queries, keys and values as they are, ``follow`` it when it is compressed.
"""

from collections.abc import Collection, Mapping
from typing import ClassVar

from .._utils.processes import is_first
from ..architectures import BlockView
from .moments import NO_OWNERS, BlockMoments
from .observers import DenseBatch
from .offload import DenseBatches
from .runner import Stream, advance, advance_dense, measure
from .store import MomentStore


class MomentProvider:
    """What the pipeline calls; nothing happens between the measurements by default.

    Attributes:
        is_measured: whether moments are measured by all processes; otherwise the first one has them.
    """

    is_measured: ClassVar[bool] = True

    def enter(self, view: BlockView, *, skip: bool = False) -> None:
        """Go through a dense block; ``skip``: nobody needs its moments."""

    def measure(self, view: BlockView, statistics: set[str], owners: Mapping[str, int] = NO_OWNERS) -> BlockMoments:
        """Return the moments of the block as it is now.

        Args:
            owners: statistic -> the process that gets it in place of the first; only where ``is_measured``.
        """
        raise NotImplementedError

    def keep_mixed(self, view: BlockView) -> None:
        """Keep what the attention of the block mixes: no step from here on changes its queries, keys and values."""

    def follow(self, view: BlockView) -> None:
        """Go through a compressed block."""


class StoredMoments(MomentProvider):
    """Moments of the dense model that are there already."""

    is_measured: ClassVar[bool] = False

    def __init__(self, moments: MomentStore):
        self.moments = moments

    def measure(self, view: BlockView, statistics: set[str], owners: Mapping[str, int] = NO_OWNERS) -> BlockMoments:
        return dict(self.moments[view.index]) if is_first() else {}


class DenseMoments(MomentProvider):
    """Moments measured in one pass of the dense model; a store would give the same."""

    def __init__(self, stream: Stream):
        self.stream = stream

    def enter(self, view: BlockView, *, skip: bool = False) -> None:
        if skip:
            advance(view, self.stream)

    def measure(self, view: BlockView, statistics: set[str], owners: Mapping[str, int] = NO_OWNERS) -> BlockMoments:
        moments = measure(view, self.stream, statistics, step=True, owners=owners)
        return {name: moment.rounded() for name, moment in moments.items()}


class HiddenStates(MomentProvider):
    """Moments measured on the hidden states that the compressed blocks produce and, where a statistic compares the two,
    beside those of the dense blocks.

    Args:
        compressed: the stream that goes through compressed blocks.
        dense: another one of the same windows, which goes through dense blocks; ``None`` where nothing compares the
            two.
        inputs: of the dense layers that are compared with those here.
    """

    def __init__(self, compressed: Stream, dense: Stream | None = None, inputs: Collection[str] = ()):
        self.compressed, self.dense, self.inputs = compressed, dense, inputs
        self._dense_batches: list[DenseBatch] | DenseBatches | None = None

    def enter(self, view: BlockView, *, skip: bool = False) -> None:
        if self.dense is not None:
            offload = self.dense.offload
            self._dense_batches = DenseBatches(offload) if offload else []
            advance_dense(view, self.dense, self._dense_batches.append, self.inputs)

    def measure(self, view: BlockView, statistics: set[str], owners: Mapping[str, int] = NO_OWNERS) -> BlockMoments:
        return measure(view, self.compressed, statistics, step=False, dense=self._dense_batches, owners=owners)

    def keep_mixed(self, view: BlockView) -> None:
        self.compressed.keep_mixed(view.attention.module)

    def follow(self, view: BlockView) -> None:
        self._dense_batches = None
        advance(view, self.compressed)
        self.compressed.mixed = None
