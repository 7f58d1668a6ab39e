"""Perplexity the way the field computes it for WikiText-2.

Shape legend: W windows, T window length, V vocabulary.
"""

import contextlib
import math
import sys
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .._utils.evaluating import evaluating
from .._utils.memory import release_memory
from .._utils.processes import dealt, gather, own_shards
from .._utils.progress import track
from .._utils.sizes import plural
from ..calibration.likelihood import token_losses
from ..calibration.moments import wide
from ..calibration.runner import advance, start
from ..data.calibration_data import check_ids
from ..errors import DataError, NumericsError, OptionError, option
from ..models.block_reader import BlockReader
from ..models.dense_model import DenseModel
from ..report.record import peak_device_memory_bytes, peak_memory_bytes

DEFINITION = (
    "non-overlapping windows, no token shared; exp of the mean negative log-likelihood per predicted token (each "
    "window predicts all its tokens but the first)"
)
BATCH_TOKENS = 4096


def windows_of(ids: Tensor, length: int, limit: int | None = None) -> Tensor:
    """``(W, T)`` non-overlapping windows of a token stream, the incomplete last one dropped.

    Raises:
        DataError: windows too short to predict a token, or the text has less than one.
    """
    if length < 2:
        raise DataError(
            f"a sample of {plural(length, 'token')} predicts none; {option('max_length')} must be at least 2"
        )
    if ids.numel() < length:
        raise DataError(
            f"the text has {plural(ids.numel(), 'token')}, less than one sample of {length}; use a smaller "
            f"{option('max_length')}"
        )
    return ids[: ids.numel() // length * length].view(-1, length)[:limit]


@torch.no_grad()
def perplexity(model: nn.Module, windows: Tensor, *, autocast: torch.dtype | None = None) -> dict:
    """Compute the perplexity of a model on ``(W, T)`` token ids; see :func:`rankfold.perplexity`.

    Several processes share the batches, and all get the numbers of one.
    """
    if not hasattr(model, "config"):  # an adapter or a compiled model has it too
        raise OptionError(f"model must be a transformers model, got a {type(model).__name__}")
    check_ids("samples", windows)
    network: Any = model  # with a device, and logits among what it returns
    device, length = network.device, windows.shape[1]
    context = torch.autocast(device.type, autocast) if autocast else contextlib.nullcontext()
    total, predicted = 0.0, 0  # of this process

    def so_far() -> str:
        return f"perplexity {math.exp(min(total / predicted, 700)):.2f}" if predicted else ""

    def nats(batch: Tensor) -> float:
        nonlocal total, predicted
        batch = batch.to(device)
        with context:
            logits = network(batch, use_cache=False).logits[:, :-1]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none")
        found = _sum(losses)
        total, predicted = total + found, predicted + losses.numel()
        return found

    batches = windows.split(max(1, BATCH_TOKENS // length))
    with evaluating(network):
        return _described(sum(dealt(nats, track(batches, "evaluating", note=so_far))), windows)


@torch.no_grad()
def streamed_perplexity(source: DenseModel, windows: Tensor, *, autocast: torch.dtype | None = None) -> dict:
    """Compute the same as :func:`perplexity`, one block of the model in memory at a time.

    Args:
        source: of :func:`~rankfold.checkpoint.streamed.open_streamed`.

    Returns:
        What :func:`perplexity` does, ``peak_memory_bytes`` of the process, and ``peak_device_memory_bytes``, ``None``
        of a CPU.

    Cost: the hidden states of the windows of a process stay in memory, ``W T D`` numbers of all together.
    """
    check_ids("samples", windows)
    batches = windows.split(max(1, BATCH_TOKENS // windows.shape[1]))
    own = [batches[index] for index in own_shards(len(batches))]
    sums = gather(_streamed(source, torch.cat(own), autocast) if own else [])
    return _described(sum(chain.from_iterable(sums)), windows) | {
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_device_memory_bytes": peak_device_memory_bytes(source.device),
    }


def _streamed(source: DenseModel, windows: Tensor, autocast: torch.dtype | None) -> list[float]:
    """Return the nats of every window."""
    stream, read = start(source, windows, autocast=autocast, most=BATCH_TOKENS), BlockReader(source)
    for index in track(range(len(source)), "evaluating"):
        advance(read(index), stream)
        release_memory()
    return [_sum(losses) for losses in token_losses(source, windows, stream)]


def _sum(losses: Tensor) -> float:
    if not torch.isfinite(losses).all():
        raise NumericsError("the model's loss is NaN or infinite on the evaluation text; check the checkpoint or dtype")
    return wide(losses).sum().item()


def _described(total: float, windows: Tensor) -> dict:
    """Return what is said of ``total`` nats on some windows."""
    tokens = len(windows) * (windows.shape[1] - 1)
    nll = total / tokens
    if nll > math.log(sys.float_info.max):
        raise NumericsError(
            f"the model's loss is {nll:.0f} nats a token, its perplexity beyond floating point; check the checkpoint"
        )
    return {
        "perplexity": math.exp(nll),
        "nll": nll,
        "windows": len(windows),
        "length": windows.shape[1],
        "tokens": tokens,
        "definition": DEFINITION,
    }
