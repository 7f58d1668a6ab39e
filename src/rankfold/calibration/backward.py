"""One backward pass through the dense model, block by block: statistics of the gradient of its loss.

Shape legend: B sequences of a batch, T tokens, D model width, V vocabulary.

The loss is the model's own: nats of every next token, summed. A forward keeps what enters every block. From the
gradient after the last one the blocks run once more, last to first, each with the graph of one batch; so one block is
resident here too. Only observers form gradients of weights, one layer at a time, out of what enters it and the gradient
at its output.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from .._utils.memory import release_memory
from .._utils.stopwatch import time_spent
from ..architectures import BlockView
from ..data.batches import Batch, Data, again
from .gradients import BackwardObserver
from .leaving import watched
from .moments import BlockMoments, check_finite, sum_shards
from .runner import Shard, Stream, advance, batch_tokens, predictions, start

TOKENS = 8192  # of a sweep, and at least
PER_DIMENSION = 4  # for each output of a layer, as many as make its moment one of full rank
PASSES = 3.5  # forwards of all blocks that a sweep takes: two and the way back; its sums, norm and head come besides
POSITIONS = 128  # of all windows of a batch together, whose logits are held at once: a vocabulary is large


def windows_for(samples: int, length: int, width: int) -> int:
    """How many of ``samples`` windows a sweep needs for moments of ``width`` outputs."""
    return min(samples, -(-max(TOKENS, PER_DIMENSION * width) // length))


def sweep_memory(source, tokens: int) -> int:
    """Estimate of what a sweep over so many tokens holds beside the block, in bytes: what enters every block and the
    gradient after one; then the logits of some positions, or the graph of one block and batch."""
    view = source.meta_block(0)
    width = view.width
    hidden = view.hidden
    item = (source.autocast or source.compute_dtype).itemsize
    batch = min(tokens, batch_tokens(source))
    graph = 4 * batch * (12 * width + 7 * hidden)  # the input of the down projection for what watches its gradient
    logits = 4 * 4 * min(batch, POSITIONS) * source.config.vocab_size  # logits, their softmax and the gradients of both
    return tokens * width * (len(source) * item + 4) + max(graph, logits)


def sweep(
    source,
    ids: Data,
    observers: Callable[[BlockView], dict[str, BackwardObserver]],
    first: int = 0,
    shards: int | None = None,
) -> Iterator[tuple[int, BlockMoments]]:
    """Measure along one backward pass.

    Args:
        source: an open model.
        ids: ``(S, T)`` token ids, ``T >= 2``, or image-text examples.
        observers: block -> name -> what watches one of its layers.
        first: the block to end at.
        shards: as for :func:`.runner.start`; where processes share them, the first one gets the moments.

    Yields:
        Index and moments of a block, from the last to ``first``.

    Raises:
        NumericsError: an activation or gradient is NaN or infinite.
        UnsupportedModelError: blocks hand keys and values on to later ones.

    Cost: two forwards of all blocks, of norm and head one; about as much again backwards; in memory what enters each of
    the blocks, ``(S, T, D)`` in the precision of the stream, and the graph of one block for one batch.
    """
    stream, inputs = start(source, ids, autocast=source.autocast, shards=shards), []
    stream.check_apart(source.name)
    for index in range(len(source)):
        inputs.append([hidden.cpu() for hidden in stream.hidden])
        advance(source.block(index), stream)
        release_memory()
    batches = zip(again(stream.ids, stream.hidden), stream.hidden, strict=True)
    # From here on the stream is the gradient, which comes back through the blocks.
    stream.hidden = [_of_loss(source, some, stream, hidden) for some, hidden in batches]
    for index in reversed(range(first, len(source))):
        view, entered = source.block(index), inputs.pop()
        with _frozen(view.module):
            found = (_back(source, view, stream, shard, entered, observers(view)) for shard in stream.shards)
            moments = sum_shards(found, is_shared=stream.is_shared)
        check_finite(moments, view.path, what="gradients")
        yield index, moments
        del view, entered, found, moments
        release_memory()


def _back(
    source, view: BlockView, stream: Stream, shard: Shard, entered: list[Tensor], observers: dict[str, BackwardObserver]
) -> BlockMoments:
    """Take the gradients of a shard back through a block, and return what was measured there."""
    for i in shard.batches:
        hidden = entered[i].to(source.device, source.compute_dtype)
        stream.hidden[i] = _through(view, stream, i, hidden, observers.values())
    return {name: observer.finish() for name, observer in observers.items()}


@torch.enable_grad()
@time_spent("forward")
def _of_loss(source, ids: Batch, stream: Stream, hidden: Tensor) -> Tensor:
    """``(B, T, D)`` gradient after the last block of the summed loss of one batch, some positions at a time."""
    x = hidden.to(source.compute_dtype).requires_grad_()
    gradient = torch.zeros_like(x)
    for some, targets in predictions(source, ids, stream, x, positions=max(1, POSITIONS // len(x))):
        loss = nn.functional.cross_entropy(some.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        gradient += torch.autograd.grad(loss, x)[0]
    return gradient


@torch.enable_grad()
@time_spent("forward")
def _through(
    view: BlockView, stream: Stream, batch: int, hidden: Tensor, observers: Iterable[BackwardObserver]
) -> Tensor:
    """``(B, T, D)`` gradient before a block out of the one after it.

    Args:
        stream: of gradients.  hidden: what entered the block.  observers: told of what they watch.
    """
    args, kwargs, _ = stream.calls[batch][view.index]  # what is added after the block takes no part
    x = hidden.requires_grad_()
    with watched(*(_Told(observer, hidden.shape[1]) for observer in observers)):
        with stream.context():
            output = view.module(x, *args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        return torch.autograd.grad(output, x, stream.hidden[batch].to(output.dtype))[0]


@contextlib.contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """Without gradients of weights, which nobody asks for; every weight is then again what its owner made it."""
    wanting = [weight for weight in module.parameters() if weight.requires_grad]
    module.requires_grad_(False)
    try:
        yield
    finally:
        for weight in wanting:
            weight.requires_grad_()


class _Told:
    """Tells an observer of the gradient at the output of its layer, sequence by sequence, also where a block hands its
    layers the tokens of all sequences in one row."""

    def __init__(self, observer: BackwardObserver, length: int):
        self.observer, self.length = observer, length

    def hooks(self):
        return [self.observer.layer.register_forward_hook(self._ran)]

    def _ran(self, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(lambda g: self.observer.add(self._sequences(args[0].detach()), self._sequences(g)))

    def _sequences(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.length, x.shape[-1])
