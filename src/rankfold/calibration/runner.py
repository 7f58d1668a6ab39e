"""Run a model block by block over batches of token windows, images or image-text examples, and measure on the way.

Shape legend: B sequences of a batch, T tokens, D model width.

Only one block is resident. The residual stream between two blocks is kept on the device in the compute precision, or
off it (:mod:`.offload`).
"""

import contextlib
import inspect
import itertools
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._utils.evaluating import evaluating
from .._utils.present import present
from .._utils.processes import gather, own_shards, process_index
from .._utils.stopwatch import time_spent
from ..architectures import BlockView
from ..data.batches import Batch, Data, Example, batches, ids_of, shard_of
from ..errors import NumericsError, UnsupportedModelError, option
from ..modules.attention import CompressedAttention
from .forward import forward
from .leaving import InFrontOf, Left, ends, watched
from .mixed import Mixed
from .moments import NO_OWNERS, BlockMoments, check_finite, sum_shards
from .observers import DenseBatch, LayerInput, RanBatch
from .offload import Offload
from .residual import Middle
from .statistics import observers_for

BATCH_TOKENS = 2048  # a forward on a CPU; larger batches are hardly faster, and their activations dwarf the block
MOST_BATCH_TOKENS = 32768  # a forward on an accelerator, where its memory allows; beyond that nothing gets faster
IGNORED = -100  # in place of a token that is not to be predicted, as PyTorch's cross entropy has it


class Call(NamedTuple):
    """What a block is called with beside the residual stream."""

    args: tuple
    kwargs: dict
    added: Tensor | None = None  # (B, T, D) what the model adds behind the block: Qwen3-VL its images, once more


def _held(call: Call) -> list[UserDict]:
    """Return what a block may put something into for later ones; transformers takes ``UserDict`` for such."""
    return [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, UserDict)]


def _own(calls: list[Call]) -> list[Call]:
    """What all blocks are called with for one batch, with places of its own for what they hand on."""
    held = {id(value): value.copy() for call in calls for value in _held(call)}
    if not held:
        return calls

    def mine(value: Any) -> Any:
        return held.get(id(value), value)

    return [
        call._replace(args=tuple(map(mine, call.args)), kwargs={name: mine(v) for name, v in call.kwargs.items()})
        for call in calls
    ]


class Shard(NamedTuple):
    """A part of the samples that is measured by itself; batches do not cross from one to the next."""

    batches: range  # of the stream
    first: int  # number of its first token among those of all shards


@dataclass
class Stream:
    """The residual stream of all batches before some block, and what every block is called with."""

    hidden: list[Tensor] | Any  # each (B, T, D); OffloadedStates where they are kept off the device
    calls: list[list[Call]] = field(repr=False)  # of every batch, of every block; batches of one shape may share them
    autocast: torch.dtype | None
    ids: Data = ()  # what the batches were made of
    shards: tuple[Shard, ...] = ()  # of this process
    tokens: int = 0  # of all shards, in all processes
    is_shared: bool = False  # whether other processes have further shards
    offload: Offload | None = None  # where the states are kept; None: on the device
    hands_on: bool = False  # whether blocks hand states on to later ones beside it: in some families keys and values
    mixed: Mixed | None = None  # what the attention of the block at hand makes of the batches, where that is kept

    def check_apart(self, name: str) -> None:
        """Raise :class:`UnsupportedModelError` where a block of the model of this name needs those before it."""
        if self.hands_on:
            raise UnsupportedModelError(
                f"blocks of {name} hand keys and values on to later ones, so none runs by itself, as gradients and "
                "latencies are measured; use a method, an allocation and a budget without them"
            )

    def copy(self) -> "Stream":
        """Another one at the same place, which goes its own way."""
        return replace(self, hidden=self.hidden.copy(), calls=[_own(calls) for calls in self.calls], mixed=None)

    def move(self, batch: int, block: int, output: Tensor) -> None:
        """Put a batch after a block that made this of it."""
        added = self.calls[batch][block].added
        self.hidden[batch] = output if added is None else output + added.to(output.dtype)

    def keep_mixed(self, attention: nn.Module) -> None:
        """From here to the end of this block, have its attention compute what it mixes of every batch once.

        Not where states are kept off the device: it would be written and read back in place of them.
        """
        if isinstance(attention, CompressedAttention) and self.offload is None:
            self.mixed = Mixed(attention)

    def context(self):
        """The precision blocks run in."""
        if self.autocast is None:
            return contextlib.nullcontext()
        # Every weight is used once a batch: a cache of them in bf16 saves nothing and costs half a block.
        device = self.offload.device if self.offload else self.hidden[0].device
        return torch.autocast(device.type, self.autocast, cache_enabled=False)


def _batched(x: Tensor) -> Tensor:
    """``(B, T, D)``, also where all samples stand in one sequence ``(T, D)``."""
    return x[None] if x.dim() == 2 else x


class StandIn(nn.Module):
    """Stands where a block was, whose attributes it lends."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.__dict__["block"] = block  # not a submodule

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)


class _Recorder(StandIn):
    """Notes what a block is called with and passes the hidden states (or ``instead``) on."""

    def __init__(self, block: nn.Module, returns_tuple: bool, last: bool):
        super().__init__(block)
        self.returns_tuple, self.last = returns_tuple, last
        self.call: Call | Any = None
        self.hidden: Tensor | Any = None
        self.instead: Tensor | None = None

    def forward(self, hidden, *args, **kwargs):
        self.hidden, self.call = _batched(hidden), Call(args, kwargs)
        if self.last:
            raise Left
        if self.instead is not None:
            hidden = self.instead[0] if hidden.dim() == 2 else self.instead
        return (hidden, None) if self.returns_tuple else hidden  # Bamba takes two apart


@contextlib.contextmanager
def _recording(source, stop: bool) -> Iterator[list[_Recorder]]:
    """The source's model with a recorder in place of every block; with ``stop`` its forward ends at the last one."""
    blocks, (path, _, name) = source.blocks, source.architecture.blocks.rpartition(".")
    last = len(blocks) - 1
    recorders = [_Recorder(b, source.architecture.returns_tuple, stop and i == last) for i, b in enumerate(blocks)]
    owner = source.model.get_submodule(path)
    there = getattr(owner, name)
    setattr(owner, name, recorders[0] if source.architecture.is_projector else nn.ModuleList(recorders))
    try:
        with evaluating(source.model):
            yield recorders
    finally:
        setattr(owner, name, there)


def batch_tokens(source) -> int:
    """Tokens of a forward: on an accelerator as many as have their activations in an eighth of its memory.

    Sums depend on the batches, so what happens to be free of the memory may not matter.
    """
    # Of shapes alone, which have no device, the accelerator that they are planned for.
    device: Any = source if source.device.type == "meta" else torch.get_device_module(source.device)
    memory = getattr(device, "mem_get_info", None)
    if source.device.type == "cpu" or memory is None:
        return BATCH_TOKENS
    view = source.meta_block(0)
    width = view.width
    hidden = view.hidden
    per_token = 4 * (8 * width + 4 * hidden)  # bytes: stream, queries, keys, values, up, gate and their fp32 copies
    return min(max(BATCH_TOKENS, memory(source.device)[1] // 8 // per_token), MOST_BATCH_TOKENS)


@torch.no_grad()
@time_spent("forward")
def start(
    source,
    ids: Data,
    *,
    autocast: torch.dtype | None,
    shards: int | None = None,
    most: int | None = None,
    offload: Offload | None = None,
) -> Stream:
    """Embed all windows, images among them; learn from the model's own forward what each block is called with.

    Masks, rotary tables (which differ between sliding and full layers), ALiBi biases: all are made by the model itself.

    Args:
        source: an open model.
        ids: ``(S, T)`` token ids, or ``(S, C, H, W)`` pixels for a part that takes images of one size, or examples.
        autocast: precision of the block forwards, or ``None``.
        shards: cut the windows into so many contiguous parts, and take those of this process; all processes call this
            then. By default all windows are one shard, which no other process has a part in.
        most: tokens of a batch; by default :func:`batch_tokens`.
        offload: where the states are kept; on the device by default.
    """
    hidden = offload.states() if offload else []
    stream = Stream(hidden, [], autocast, is_shared=shards is not None, offload=offload)
    of_size: dict[tuple[int, ...], tuple[Any, list[Call]]] = {}  # the first windows of each size
    # Whether others are called alike; some models hand their tokens to every block. A look waits for the device. Where
    # they are, no forward of a size that is known goes beyond the first block.
    alike: bool | None = None
    shards, own = (1, range(1)) if shards is None else (shards, own_shards(shards))
    stream.ids, ends, counts = shard_of(ids, own, shards), [0], list[int]()
    with _recording(source, stop=True) as recorders:
        for shard in own:
            some = shard_of(ids, range(shard, shard + 1), shards)
            counts.append(0)
            for batch in batches(some, most or batch_tokens(source), source.part):
                size = () if isinstance(batch, Example) else batch.shape
                known = of_size.get(size) if alike else None
                recorders[0].last = known is not None or len(recorders) == 1
                with contextlib.suppress(Left):
                    forward(source, batch.read() if isinstance(batch, Example) else batch)
                first = recorders[0].hidden.to(autocast or recorders[0].hidden.dtype)
                stream.hidden.append(first)
                counts[-1] += first.shape[:2].numel()
                calls = known[1] if known else _calls(recorders, first.dtype)
                if not (known or isinstance(batch, Example)):
                    windows, same = of_size.setdefault(size, (batch, calls))
                    if alike is None and not torch.equal(windows, batch):
                        alike = _alike(same, calls)
                    calls = same if alike else calls
                stream.calls.append(calls)
            ends.append(len(stream.hidden))
    _number_tokens(stream, [range(*pair) for pair in itertools.pairwise(ends)], counts)
    stream.hands_on = any(_held(call) for calls in stream.calls[:1] for call in calls) and _reads_others(source)
    return stream


def _reads_others(source) -> bool:
    """Whether any block reads keys and values of another; yes where the spec does not say."""
    told = isinstance(source.architecture.attention.cached, str)
    return not told or any(view.attention.reads_others for view in source.meta_blocks())


def _number_tokens(stream: Stream, parts: list[range], counts: list[int]) -> None:
    """Note where the tokens of each shard stand among those of all; a shard without samples has no moments."""
    everywhere = gather(counts) if stream.is_shared else [counts]
    firsts = itertools.accumulate(counts, initial=sum(map(sum, everywhere[: process_index()])))
    stream.tokens = sum(map(sum, everywhere))
    stream.shards = tuple(Shard(part, first) for part, first in zip(parts, firsts, strict=False) if part)


def _calls(recorders: list[_Recorder], dtype: torch.dtype) -> list[Call]:
    """What every block was called with. A block whose output the model adds to on the way to the next one is told by
    what enters that: recorders pass on what they receive."""
    calls, entered = [r.call for r in recorders], [r.hidden for r in recorders]
    for i, (before, after) in enumerate(itertools.pairwise(entered)):
        if after is not before and not torch.equal(after, before):
            calls[i] = calls[i]._replace(added=(after - before).to(dtype))
    return calls


def _alike(one: Any, other: Any) -> bool:
    """Tell whether two calls, or parts of them, are equal; an object of another kind equals only itself."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.dtype == other.dtype and torch.equal(one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return one is other or (isinstance(one, bool | int | float | str) and one == other)


@time_spent("forward")
def outputs(source, ids: Batch, stream: Stream, hidden: Tensor | None = None, *, keep: Tensor | None = None) -> Tensor:
    """What the model's own norm, and head where it writes text, make of one batch of a stream behind the last block.

    Args:
        source: an open model.  ids: what the batch was started from.  stream: what it belongs to.
        hidden: ``(B, T, D)`` the batch; the only one of the stream by default. If it needs a gradient, the result has
            one.
        keep: positions whose logits are wanted, where the model can leave out others; all by default.

    Returns:
        ``(B, T, vocabulary)`` logits of a decoder, ``(B, T, D)`` normalised states of an encoder, what a projector
        sends.

    Raises:
        NumericsError: there is a NaN in it.
    """
    some = {} if keep is None else {"logits_to_keep": keep}
    hidden = present(stream.hidden[0] if hidden is None else hidden)
    if source.architecture.is_projector:
        return hidden
    with torch.set_grad_enabled(hidden.requires_grad), _recording(source, stop=False) as recorders, stream.context():
        recorders[-1].instead = hidden.to(source.model.dtype)
        found = forward(source, ids_of(ids), **some)  # images are in the stream
    found = found.logits if source.architecture.decoder else _batched(found.last_hidden_state)
    if torch.aminmax(found.detach()).min.isnan():  # isnan() would make a second tensor of a vocabulary's size
        raise NumericsError(
            f"{source.name} computes NaN on the calibration samples: its numbers are too large for "
            f"{str(source.model.dtype).removeprefix('torch.')}, or its weights are damaged; give it in float32"
        )
    return found


def outputs_at(source, ids: Batch, stream: Stream, hidden: Tensor, positions: Tensor) -> Tensor:
    """:func:`outputs` at some positions; others are not computed where the model can leave them out."""
    keeps = _leaves_out(source)
    found = outputs(source, ids, stream, hidden, keep=positions if keeps else None)
    return found if keeps else found[:, positions]


def _leaves_out(source) -> bool:
    """Whether the model can leave out logits."""
    return "logits_to_keep" in inspect.signature(source.model.forward).parameters


def targets_of(source, batch: Batch) -> Tensor:
    """``(B, T)`` tokens of a batch; :data:`IGNORED` where an image of an example stands, which no model predicts."""
    ids: Any = ids_of(batch)
    ids = ids.to(source.device)
    has_images = isinstance(batch, Example) and source.image_token is not None
    return ids.masked_fill(ids == source.image_token, IGNORED) if has_images else ids


def predictions(
    source, ids: Batch, stream: Stream, hidden: Tensor, *, positions: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits ``(B, n, V)`` and the next tokens ``(B, n)`` of one batch behind the last block, some positions at a time;
    those where only images follow are left out.

    Args:
        source, ids, stream, hidden: as for :func:`outputs`.
        positions: at most so many of every sequence at once, where the model can leave out logits; otherwise all.
    """
    targets = targets_of(source, ids)[:, 1:]
    followed = torch.arange(targets.shape[1], device=targets.device)
    if isinstance(ids, Example):
        followed = followed[targets[0] != IGNORED]
    for some in followed.split(positions if _leaves_out(source) else max(1, len(followed))):
        yield outputs_at(source, ids, stream, hidden, some), targets[:, some]


@torch.no_grad()
@time_spent("forward")
def advance(view: BlockView, stream: Stream, module: nn.Module | None = None) -> None:
    """Replace the stream by the output of the block (of ``module`` where given)."""
    for i, _, output in _forward(view, stream, module or view.module):
        stream.move(i, view.index, output)


@torch.no_grad()
def attend(view: BlockView, stream: Stream) -> None:
    """Run the block on the stream as far as its attention mixes values; the stream stays where it is."""
    with watched(InFrontOf(view.attention.output_module)):
        for _ in _forward(view, stream, view.module):
            pass


@torch.no_grad()
@time_spent("forward")
def advance_dense(
    view: BlockView, stream: Stream, keep: Callable[[DenseBatch], None], inputs: Iterable[str] = ()
) -> None:
    """Replace the stream by the output of the dense block; that, and what it was between attention and MLP, is kept for
    each batch.

    Args:
        inputs: statistics of inputs that are kept, too, where the block has them.
    """
    middle, paths = Middle(view), view.readers
    layers = {name: LayerInput(view.module.get_submodule(paths[name][0])) for name in inputs if name in paths}
    with watched(middle, *layers.values()):
        for i, _, output in _forward(view, stream, view.module):
            entered = {name: layer.take() for name, layer in layers.items()}
            keep(DenseBatch(middle.take(stream.hidden[i]).to(output.dtype), output, entered))
            stream.move(i, view.index, output)


@torch.no_grad()
@time_spent("forward")
def measure(
    view: BlockView,
    stream: Stream,
    statistics: set[str],
    *,
    step: bool,
    dense: Sequence[DenseBatch] | None = None,
    owner: int = 0,
    owners: Mapping[str, int] = NO_OWNERS,
) -> BlockMoments:
    """Return the moments of one block over the stream.

    Args:
        view: the block, weights in place.
        stream: its input.
        statistics: names out of :data:`rankfold.calibration.statistics.STATISTICS`.
        step: also replace the stream by the block's output (one pass); otherwise it stays where it is.
        dense: the same batches in the dense model, for statistics that compare with it.
        owner: the process that gets the moments where several share the stream; the others get nothing.
        owners: statistic -> the process that gets it in place of ``owner``.

    Raises:
        NumericsError: an activation is NaN or infinite.
    """
    found = (_measure_shard(view, stream, shard, statistics, step, dense) for shard in stream.shards)
    moments = sum_shards(found, is_shared=stream.is_shared, owner=owner, owners=owners)
    with time_spent("moments"):
        check_finite(moments, view.path)
    return moments


def _measure_shard(
    view: BlockView, stream: Stream, shard: Shard, statistics: set[str], step: bool, dense: Sequence[DenseBatch] | None
) -> BlockMoments:
    observers = observers_for(view, statistics, stream.tokens, shard.first)
    with watched(*observers.values(), *([] if step else ends(view, statistics))):
        for i, kwargs, output in _forward(view, stream, view.module, shard.batches):
            batch = RanBatch(stream.hidden[i], kwargs, output, dense[i] if dense else None)
            with time_spent("moments"):
                for observer in observers.values():
                    observer.after(batch)
            if step:
                stream.move(i, view.index, output)
    with time_spent("moments"):
        return {name: observer.finish() for name, observer in observers.items()}


def block_output(view: BlockView, stream: Stream, batch: int, module: nn.Module | None = None) -> Tensor:
    """Return what a block makes of one batch of a stream, ``(B, T, D)``; with a gradient where its weights need one.

    Args:
        batch: number of the batch.
        module: in place of the block.
    """
    args, kwargs, _ = stream.calls[batch][view.index]
    with stream.context(), stream.mixed.used(batch) if stream.mixed else contextlib.nullcontext():
        output = (module or view.module)(view.taken(stream.hidden[batch]), *args, **kwargs)
    return _batched(output[0] if isinstance(output, tuple) else output)


def middle_output(view: BlockView, stream: Stream, batch: int) -> Tensor:
    """Return what a block makes of one batch up to the place between attention and MLP; see :func:`block_output`.

    The block must have such a place (``view.middle``); what comes after it does not run.
    """
    middle = Middle(view)
    with watched(middle, InFrontOf(present(view.middle))), contextlib.suppress(Left):
        block_output(view, stream, batch)
    return middle.take(stream.hidden[batch])


def _forward(view, stream, module, of: range | None = None) -> Iterator[tuple[int, dict, Tensor | Any]]:
    """Yield the number of each batch, or of those in a range, what the block is called with beside it by name, and the
    output, which is ``None`` where the forward was left early."""
    names = list(inspect.signature(type(view.module).forward).parameters)[2:]  # RecurrentGemma gives them by place
    ranges = []  # looked at once behind the last batch: a look waits for the device
    for i in range(len(stream.hidden)) if of is None else of:
        args, kwargs, _ = stream.calls[i][view.index]
        kwargs = dict(zip(names, args, strict=False)) | kwargs
        try:
            output = block_output(view, stream, i, module)
        except Left:
            yield i, kwargs, None
            continue
        ranges += torch.aminmax(output)
        yield i, kwargs, output.to(stream.hidden[i].dtype)
    if ranges and not torch.stack(ranges).isfinite().all():
        raise NumericsError(f"the output of {view.path} has NaN or infinite entries; try {option('dtype', 'float32')}")
