"""Read a checkpoint back, block by block: does it compute what the blocks computed before they were written?"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..calibration.runner import Stream, advance, outputs, start
from ..data.batches import again, noise
from ..errors import CheckpointError
from ..models.dense_model import DenseModel
from ..models.weights import Weights, fill_outer

LENGTH = 64  # tokens
TOLERANCE = 1e-3  # of the logits' norm; or a few roundings of the stored dtype, which the head in memory is spared
LEAST = 1e-4  # a logit; smaller ones, as of a head of zeros, predict all tokens alike, and may be rounded off


def reading_back(source: DenseModel, outer: int) -> int:
    """Return the bytes that reading a checkpoint back takes: what surrounds its blocks, and logits of both models.

    Args:
        outer: parameters around the blocks.
    """
    logits = 4 * min(LENGTH, source.context_length) * source.config.vocab_size if source.architecture.decoder else 0
    return outer * source.dtype.itemsize + 3 * logits  # their difference, too


class Probe:
    """A short window that follows the compressed blocks while they are in memory.

    Args:
        source: the model the blocks come from.
        tolerance: how far logits may be apart, of their norm; by default what roundings to the stored dtype explain.
        context: tokens of the longest window that what is written computes alike, where that is less than the context.
    """

    def __init__(self, source: DenseModel, tolerance: float | None = None, context: int | None = None):
        self.source = source
        self.tolerance = tolerance or max(TOLERANCE, 8 * torch.finfo(source.dtype).eps)
        self.ids = noise(source.part, 1, min(LENGTH, context or source.context_length))
        self.stream = start(source, self.ids, autocast=None)
        self.embedded = self.stream.hidden[0]

    def follow(self, view) -> None:
        """Go through a block."""
        advance(view, self.stream)

    def check(self, folder: Path, model: PreTrainedModel) -> float:
        """Run the checkpoint in ``folder`` on the same window; one block is resident.

        Args:
            model: empty, as the checkpoint's config describes it.

        Returns:
            How far its logits are from those of the blocks in memory, of their norm.

        Raises:
            CheckpointError: that is too far.
        """
        return self.compare(self._reopen(folder, model))

    def compare(self, written: DenseModel) -> float:
        """:meth:`check` of what has been read back already."""
        stream = start(written, self.ids, autocast=None, most=LENGTH)  # of a compressed block no widths are known
        embedded, difference = stream.hidden[0], self._after(written, stream.copy())
        differences = [difference]
        if difference > self.tolerance:  # roundings of embeddings grow in a model that is damaged: tell them apart
            stream.hidden[0] = self.embedded
            differences = [_relative(embedded, self.embedded), self._after(written, stream)]
        if not all(found <= self.tolerance for found in differences):
            raise CheckpointError(
                f"the checkpoint written computes other logits than the model in memory (they differ by "
                f"{difference:.1e} of their norm); this is a bug, please report it"
            )
        return difference

    def _after(self, written: DenseModel, stream: Stream) -> float:
        """Return how far logits are from those in memory, for a stream before the first block of what is written."""
        for index in range(len(written)):
            advance(written.block(index), stream)
        (batch,) = again(self.ids, stream.hidden)
        return _relative(outputs(written, batch, stream), outputs(self.source, batch, self.stream))

    def _reopen(self, folder: Path, model: PreTrainedModel) -> DenseModel:
        source, weights = self.source, Weights(folder)
        fill_outer(model, source.architecture.blocks, weights, source.dtype, source.device)
        return DenseModel(model, folder.name, source.device, source.dtype, weights, part=source.part)


def _relative(got: Tensor, expected: Tensor) -> float:
    """Return how far two are apart, of the norm of the second."""
    size = max(expected.float().norm().item(), LEAST * expected.numel() ** 0.5)
    return (got.float() - expected.float()).norm().item() / size
