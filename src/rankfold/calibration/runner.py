"""Run the decoder block by block over token batches, and measure on the way.

Shape legend: B sequences of a batch, T tokens, D model width, H query heads, K key heads, N head dimension.

Only one block is resident. The residual stream between two blocks is kept on the device in the compute precision.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..architectures import BlockView
from ..errors import NumericsError
from ..linalg.psd import all_finite
from .moments import (
    BlockMoments,
    HeadMoment,
    Moment,
    Samples,
    VectorMoment,
    accumulator,
    check_finite,
    head_grams,
    heads_first,
)

__all__ = ["STATISTICS", "Stream", "advance", "logits", "measure", "start"]

# What can be measured in a block. Methods name the ones they need.
STATISTICS = {
    "attention_input": "input of q, k and v",
    "attention_output": "input of the output projection",
    "mlp_input": "input of up and gate",
    "mlp_samples": "rows of the input of up, for methods that iterate on activations",
    "mlp_hidden": "input of the down projection",
    "query": "rotated queries, per head",
    "key": "rotated keys, per key head",
    "query_key": "sum over sequences of (Q^T Q) o (K^T K), per head: the exact cost of dropping dimensions",
    "value": "values, per key head",
    "absolute": "also the mean absolute value of every input above, for the l1 pre-conditioner",
    "influence": "1 - cosine between input and output of the block, of its attention and of its MLP",
}
BATCH_TOKENS = 2048  # a forward; larger batches are hardly faster, and their activations dwarf the block
SAMPLE_ROWS = 4096  # kept of `mlp_samples`, spread evenly over all tokens


@dataclass
class Stream:
    """The residual stream of all batches before some block, and what every block is called with."""

    hidden: list[Tensor]  # each (B, T, D)
    calls: dict[int, list[tuple[tuple, dict]]] = field(repr=False)  # batch size -> (args, kwargs) per block
    autocast: torch.dtype | None

    def context(self):
        """The precision blocks run in."""
        if self.autocast is None:
            return contextlib.nullcontext()
        # Every weight is used once a batch: a cache of them in bf16 saves nothing and costs half a block.
        return torch.autocast(self.hidden[0].device.type, self.autocast, cache_enabled=False)


class _Stop(Exception):
    """Leaves a forward whose rest is not needed: the model's before norm and head, a block's before its last product."""


def _stop(*_):
    raise _Stop


class _Recorder(nn.Module):
    """Stands in for a block: notes what it is called with and passes the hidden states (or ``instead``) on."""

    def __init__(self, block: nn.Module, returns_tuple: bool, last: bool):
        super().__init__()
        self.__dict__["block"] = block  # not a submodule: only its attributes are lent
        self.returns_tuple, self.last = returns_tuple, last
        self.call: tuple[tuple, dict] | None = None
        self.hidden: Tensor | None = None
        self.instead: Tensor | None = None

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)

    def forward(self, hidden, *args, **kwargs):
        self.hidden, self.call = hidden, (args, kwargs)
        if self.last:
            raise _Stop
        hidden = hidden if self.instead is None else self.instead
        return (hidden,) if self.returns_tuple else hidden


@contextlib.contextmanager
def _recording(source, stop: bool) -> Iterator[list[_Recorder]]:
    """The source's model with a recorder in place of every block; with ``stop`` its forward ends at the last one."""
    blocks, (path, _, name) = source.blocks, source.architecture.blocks.rpartition(".")
    last = len(blocks) - 1
    recorders = [_Recorder(b, source.architecture.returns_tuple, stop and i == last) for i, b in enumerate(blocks)]
    owner = source.model.get_submodule(path)
    setattr(owner, name, nn.ModuleList(recorders))
    try:
        yield recorders
    finally:
        setattr(owner, name, blocks)


@torch.no_grad()
def start(source, ids: Tensor, *, autocast: torch.dtype | None) -> Stream:
    """Embed all windows; learn from the model's own forward what each block is called with.

    Masks, rotary tables (which differ between sliding and full layers), ALiBi biases: all are made by the model itself.

    Args:
        source: an open model.
        ids: ``(S, T)`` token ids.
        autocast: precision of the block forwards, or ``None``.
    """
    per_batch = max(1, BATCH_TOKENS // ids.shape[1])
    stream = Stream([], {}, autocast)
    with _recording(source, stop=True) as recorders:
        for batch in ids.split(per_batch):
            with contextlib.suppress(_Stop):
                source.model(input_ids=batch.to(source.device), use_cache=False)
            stream.hidden.append(recorders[0].hidden.to(autocast or recorders[0].hidden.dtype))
            stream.calls.setdefault(len(batch), [r.call for r in recorders])
    return stream


@torch.no_grad()
def logits(source, ids: Tensor, stream: Stream) -> Tensor:
    """``(B, T, vocabulary)``: what the model's own norm and head make of a stream of one batch that is behind the last block.

    Args:
        source: an open model.  ids: ``(B, T)`` what the stream was started from.  stream: one batch.
    """
    with _recording(source, stop=False) as recorders:
        recorders[-1].instead = stream.hidden[0]
        return source.model(input_ids=ids.to(source.device), use_cache=False).logits


@torch.no_grad()
def advance(view: BlockView, stream: Stream, module: nn.Module | None = None) -> None:
    """Replace the stream by the output of the block (of ``module`` where given)."""
    for i, _, output in _forward(view, stream, module or view.module):
        stream.hidden[i] = output


@torch.no_grad()
def measure(view: BlockView, stream: Stream, statistics: set[str], *, step: bool) -> BlockMoments:
    """Moments of one block over the stream.

    Args:
        view: the block, weights in place.
        stream: its input.
        statistics: names out of :data:`STATISTICS`.
        step: also replace the stream by the block's output (one pass); otherwise it stays where it is.

    Raises:
        NumericsError: an activation is NaN or infinite.
    """
    probes = _Probes(view, statistics, sum(h.shape[0] * h.shape[1] for h in stream.hidden), stop=not step)
    with probes.attached():
        for i, kwargs, output in _forward(view, stream, view.module):
            probes.after(stream.hidden[i], kwargs, output)
            if step:
                stream.hidden[i] = output
    moments = probes.finish()
    check_finite(moments, view.path)
    return moments


def _forward(view, stream, module) -> Iterator[tuple[int, dict, Tensor | None]]:
    """Batch, its keyword arguments and the output, which is ``None`` where a probe stopped the block early."""
    for i, hidden in enumerate(stream.hidden):
        args, kwargs = stream.calls[len(hidden)][view.index]
        with stream.context():
            try:
                output = module(hidden, *args, **kwargs)
            except _Stop:
                yield i, kwargs, None
                continue
        output = output[0] if isinstance(output, tuple) else output
        if not all_finite(output):
            raise NumericsError(f"the output of {view.path} has NaN or infinite entries; try --dtype float32")
        yield i, kwargs, output.to(hidden.dtype)


class _Probes:
    """Hooks on one block that add what they see to the wanted moments."""

    def __init__(self, view: BlockView, statistics: set[str], tokens: int, *, stop: bool):
        self.view, self.statistics, self.tokens = view, statistics, tokens
        self.stop = stop and "influence" not in statistics  # nothing is measured behind the input of down
        self.attention = view.attention
        self.moments: dict[str, VectorMoment | HeadMoment | Samples] = {}
        self.projected: list[Tensor] = []  # outputs of the q/k/v projections of the current batch
        self.seen: dict[str, Tensor] = {}  # stream in the middle, outputs of the two halves
        self.influence, self.rows = torch.zeros(3, dtype=torch.float64), 0
        self.product, self.positions = 0.0, 0.0

    @contextlib.contextmanager
    def attached(self):
        view, handles = self.view, []
        mlp = view.mlp

        def inputs(module, name):
            if name in self.statistics:
                handles.append(module.register_forward_pre_hook(lambda _, args: self._add(name, args[0])))

        inputs(self.attention.qkv_modules[0], "attention_input")
        inputs(self.attention.output_module, "attention_output")
        if mlp:
            inputs(view.module.get_submodule(mlp.spec.up), "mlp_input")
            inputs(view.module.get_submodule(mlp.spec.up), "mlp_samples")
            inputs(view.module.get_submodule(mlp.spec.down), "mlp_hidden")
            if self.stop:
                handles.append(view.module.get_submodule(mlp.spec.down).register_forward_pre_hook(_stop))
        if self.statistics & {"query", "key", "query_key", "value"}:
            for module in self.attention.qkv_modules:
                handles.append(module.register_forward_hook(lambda _, __, out: self.projected.append(out)))
        if "influence" in self.statistics:
            if view.middle is not None:
                handles.append(view.middle.register_forward_pre_hook(lambda _, a: self.seen.update(middle=a[0])))
            else:
                handles.append(
                    self.attention.module.register_forward_hook(lambda _, __, out: self.seen.update(attention=out[0]))
                )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _add(self, name: str, x: Tensor) -> None:
        if name not in self.moments:
            every = max(1, self.tokens // SAMPLE_ROWS)
            absolute = "absolute" in self.statistics
            moment = Samples(every) if name == "mlp_samples" else VectorMoment(x.shape[-1], x.device, absolute=absolute)
            self.moments[name] = moment
        self.moments[name].add(x)

    def after(self, hidden: Tensor, kwargs: dict, output: Tensor) -> None:
        """What needs the whole block to have run."""
        if self.projected:
            self._heads(kwargs)
        if "influence" in self.statistics:
            self._influence(hidden, output)

    def _heads(self, kwargs: dict) -> None:
        query, key, value = self.attention.split_states(self.projected)  # (B, T, H or K, N)
        self.projected = []
        if "value" in self.statistics:
            exact, value = value.dtype is torch.bfloat16, heads_first(value)
            self._head("value").add(value, head_grams(value, exact_in_bf16=exact))
        if self.statistics & {"query", "key", "query_key"}:
            query, key = self._rotated(query, key, kwargs)
            q_grams, k_grams = head_grams(query), head_grams(key)
            self._head("query").add(query, q_grams)
            self._head("key").add(key, k_grams)
            k_grams = k_grams.repeat_interleave(self.attention.heads // self.attention.kv_heads, dim=1)
            self.product = self.product + (q_grams * k_grams).to(accumulator(query.device)).double().sum(0)
            self.positions += query.shape[0] * float(query.shape[2]) ** 2

    def _head(self, name: str) -> HeadMoment:
        return self.moments.setdefault(name, HeadMoment())

    def _rotated(self, query: Tensor, key: Tensor, kwargs: dict) -> tuple[Tensor, Tensor]:
        """Queries ``(B, H, T, N)`` and keys ``(B, K, T, N)`` as they meet, fp32."""
        attention = self.attention
        if attention.norms:
            q_norm, k_norm = (getattr(attention.module, name) for name in attention.norms)
            query, key = q_norm(query), k_norm(key)
        query, key = heads_first(query), heads_first(key)
        if attention.rotary_dim:
            half = attention.rotary_dim // 2
            cos, sin = (t[:, None, :, :half] for t in kwargs["position_embeddings"])  # (B, 1, T, half)
            for x in (query, key):
                a, b = x[..., :half], x[..., half : 2 * half]
                turned = a * sin
                a.mul_(cos).addcmul_(b, sin, value=-1)
                b.mul_(cos).add_(turned)
        return query, key

    def _influence(self, hidden: Tensor, output: Tensor) -> None:
        if "middle" in self.seen:
            middle = self.seen.pop("middle").view_as(hidden)
            pairs = [(hidden, output), (hidden, middle), (middle, output)]
        else:  # parallel: each half alone moves the block's input
            attention = self.seen.pop("attention")
            pairs = [(hidden, output), (hidden, hidden + attention), (hidden, output - attention)]
        for j, (a, b) in enumerate(pairs):
            cosine = nn.functional.cosine_similarity(a.float(), b.float(), dim=-1)
            self.influence[j] += (1 - cosine).cpu().double().sum()
        self.rows += hidden.shape[0] * hidden.shape[1]

    def finish(self) -> BlockMoments:
        moments = {name: m.finish() for name, m in self.moments.items() if name in self.statistics}
        if "query_key" in self.statistics:
            moments["query_key"] = Moment(self.positions, None, None, self.product)
        if "influence" in self.statistics:
            moments["influence"] = Moment(self.rows, self.influence, None, None)
        return moments
