"""Reading blocks one after the other, on accelerators one ahead."""

from concurrent.futures import Future, ThreadPoolExecutor

from .._utils.stopwatch import time_spent
from ..architectures import BlockView
from .dense_model import DenseModel


class BlockReader:
    """Hands out blocks in order; where reading overlaps, the next one is read while the caller works on this one."""

    def __init__(self, source: DenseModel):
        self.source = source
        self._pool = ThreadPoolExecutor(max_workers=1) if source.overlaps else None
        self._ahead: tuple[int, Future] | None = None

    @time_spent("reading")
    def __call__(self, index: int) -> BlockView:
        """Block ``index``; see :meth:`rankfold.models.dense_model.DenseModel.block`. Nothing here keeps it."""
        if self._pool is None:
            return self.source.block(index)
        ahead, self._ahead = self._ahead, None
        view = ahead[1].result() if ahead and ahead[0] == index else self.source.block(index)
        if index + 1 < len(self.source):
            self._ahead = index + 1, self._pool.submit(self.source.block, index + 1)
        return view
