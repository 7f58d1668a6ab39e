"""Read blocks one after the other; where an accelerator computes, one ahead into host memory."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from .._utils.stopwatch import time_spent
from ..architectures import BlockView
from .dense_model import DenseModel


class BlockReader:
    """Hands out blocks in order; where reading overlaps, the next one is read while the caller works on this one.

    What is read ahead waits in host memory, page-locked where a device copies faster from there, and goes to the device
    when it is asked for: the device holds one block.
    """

    def __init__(self, source: DenseModel):
        self.source = source
        self._pool = ThreadPoolExecutor(max_workers=1) if source.overlaps else None
        self._ahead: tuple[int, Future[nn.Module]] | None = None
        locks = source.device.type not in ("cpu", "mps")  # the memory of a Mac is its device's
        self._keep = torch.Tensor.pin_memory if locks else torch.Tensor.clone  # of files that are mapped, not yet read

    @time_spent("reading")
    def __call__(self, index: int) -> BlockView:
        """Return block ``index``; see :meth:`rankfold.models.dense_model.DenseModel.block`. Nothing here keeps it."""
        if self._pool is None:
            return self.source.block(index)
        ahead, self._ahead = self._ahead, None
        module = ahead[1].result() if ahead and ahead[0] == index else self.source.read(index)
        if index + 1 < len(self.source):
            self._ahead = index + 1, self._pool.submit(self._read_ahead, index + 1)
        return self.source.moved(index, module)

    def _read_ahead(self, index: int) -> nn.Module:
        return self.source.read(index)._apply(self._keep)
