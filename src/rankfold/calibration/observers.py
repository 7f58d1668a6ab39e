"""What can be measured in a block: one observer a statistic, in one table.

Shape legend: B sequences of a batch, T tokens, D model width, H query heads, K key heads, N head dimension.

An observer hangs hooks on a block, sees one batch after another, and ends as a moment. A new statistic is one class (or one
more row with an old one) in :data:`STATISTICS`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..architectures import AttentionView, BlockView, Norm, read_linear
from ..linalg.mean_square import square_features
from .experts import INPUT, ROUTING, ExpertInputs, RouterWeights
from .moments import (
    CrossMoment,
    CrossSums,
    HeadMoment,
    Moment,
    Samples,
    VectorMoment,
    accumulator,
    head_grams,
    heads_first,
)

__all__ = [
    "SAMPLE_ROWS",
    "STATISTICS",
    "STORED",
    "Batch",
    "DenseBatch",
    "Middle",
    "Observer",
    "Statistic",
    "observers_for",
]

SAMPLE_ROWS = 8  # rows of `mlp_samples` kept for every hidden unit; fits on fewer remember them (docs/papers.md)


class Batch(NamedTuple):
    """What went through a block."""

    hidden: Tensor  # (B, T, D)
    kwargs: dict  # what the block was called with
    output: Tensor | None  # (B, T, D), where the forward was not cut short
    dense: "DenseBatch | None" = None  # the same tokens in the dense model, where a second stream carries them


class DenseBatch(NamedTuple):
    """The dense model's residual stream for one batch."""

    middle: Tensor  # (B, T, D) between attention and MLP
    output: Tensor  # (B, T, D) behind the block


class Observer(Protocol):
    """Sees every batch that goes through one block."""

    def hooks(self) -> Iterable:
        """Hang hooks on the block; returns their handles."""

    def after(self, batch: Batch) -> None:
        """A batch has run."""

    def finish(self) -> Moment:
        """What was measured."""


class InputObserver:
    """Second moment of what enters a layer, and where wanted the sum over every window.

    Args:
        norm: that the layer's output goes through; what enters is then divided by the RMS of that output.
    """

    def __init__(self, module: nn.Module, *, absolute: bool, windows: bool, norm: Norm | None = None):
        self.module, self.absolute, self.norm = module, absolute, norm
        self.sums: VectorMoment | None = None
        self.windows: list[Tensor] | None = [] if windows else None
        self.lengths: list[int] = []  # of the windows
        self._entered: Tensor | None = None  # of this batch; some families flatten it before the layer

    def hooks(self):
        return [self.module.register_forward_pre_hook(lambda _, args: self._add(args[0]))]

    def _add(self, x: Tensor) -> None:
        if self.norm is not None:
            x = x.float() / rms_behind(self.module, x, self.norm)
        if self.sums is None:
            self.sums = VectorMoment(x.shape[-1], x.device, absolute=self.absolute)
        self.sums.add(x)
        if self.windows is not None:
            self._entered = x.detach()

    def after(self, batch) -> None:
        if self.windows is not None:
            x, self._entered = self._entered.view(*batch.hidden.shape[:2], -1), None
            self.windows.append(x.sum(1, dtype=torch.float32).to(accumulator(x.device)))
            self.lengths += [x.shape[1]] * len(x)

    def finish(self) -> Moment:
        moment = self.sums.finish()
        if self.windows is not None:
            moment.windows = torch.cat(self.windows)
            if len(set(self.lengths)) > 1:
                of_mean = sum(self.lengths) / len(self.lengths) / torch.tensor(self.lengths)
                moment.windows *= of_mean.sqrt().to(moment.windows)[:, None]
        return moment


def rms_behind(layer: nn.Module, x: Tensor, norm: Norm) -> Tensor:
    """``(..., 1)`` what a norm behind a layer divides by, for every row of ``x`` ``(..., N)``."""
    out = nn.functional.linear(x.detach(), read_linear(layer).weight.to(x.dtype))
    return (out.float().square().mean(-1, keepdim=True) + norm.eps).sqrt()


class EnergyObserver:
    """Squares of what enters some layers, one layer's inputs behind the other's."""

    def __init__(self, modules: list[nn.Module]):
        self.modules, self.totals, self.rows = modules, [0.0] * len(modules), 0

    def hooks(self):
        return [m.register_forward_pre_hook(lambda _, a, i=i: self._add(i, a[0])) for i, m in enumerate(self.modules)]

    def _add(self, layer: int, x: Tensor) -> None:
        squares = x.detach().flatten(0, -2).float().square().sum(0)
        self.totals[layer] = self.totals[layer] + squares.to(accumulator(x.device)).double()

    def after(self, batch) -> None:
        self.rows += batch.hidden.shape[0] * batch.hidden.shape[1]

    def finish(self) -> Moment:
        return Moment(self.rows, torch.cat(self.totals), None, None)


class SamplesObserver:
    """Rows of what enters a layer, spread evenly over all tokens."""

    def __init__(self, module: nn.Module, *, tokens: int, rows: int):
        self.module, self.samples = module, Samples(max(1, tokens // rows))

    def hooks(self):
        return [self.module.register_forward_pre_hook(lambda _, args: self.samples.add(args[0]))]

    def after(self, batch) -> None:
        pass

    def finish(self) -> Moment:
        return self.samples.finish()


class Heads:
    """Queries, keys and values of one batch as they meet, fp32; each is computed once, for all observers that ask."""

    def __init__(self, attention: AttentionView, outputs: list[Tensor], kwargs: dict):
        self.attention, self.kwargs = attention, kwargs
        self.projected = attention.split_states(outputs)  # (B, T, H or K, N)

    @cached_property
    def value(self) -> Tensor:
        """``(B, K, T, N)``"""
        return heads_first(self.projected[2])

    def relative_squares(self, index: int) -> Tensor:
        """Features of the mean square that the norm of queries (0) or keys (1) divides by, ``(1, H, B T, N + 1)``.

        Norms over all heads are one head of all their dimensions.
        """
        x = heads_first(self.attention.flat_for_norm(self.projected[index]))
        return square_features(x.transpose(0, 1).flatten(1, 2)[None], self.attention.head_norms[index].eps)

    @cached_property
    def rotated(self) -> tuple[Tensor, Tensor]:
        """Queries ``(B, H, T, N)`` and keys ``(B, K, T, N)``, after norm and rotation."""
        attention, (query, key, _) = self.attention, self.projected
        query, key = (heads_first(x) for x in attention.normalised(query, key))
        if attention.rotary_dim:
            half = attention.rotary_dim // 2
            cos, sin = (t[:, None] for t in attention.angles(self.kwargs))  # (B, 1, T, half)
            for x in (query, key):
                a, b = x[..., :half], x[..., half : 2 * half]
                turned = a * sin
                a.mul_(cos).addcmul_(b, sin, value=-1)
                b.mul_(cos).add_(turned)
        return query, key

    @property
    def query(self) -> Tensor:
        return self.rotated[0]

    @property
    def key(self) -> Tensor:
        return self.rotated[1]

    @cached_property
    def key_spread(self) -> Tensor:
        """Keys minus their mean over the window: softmax ignores a shift that all keys of a query share, unless a sink stands
        beside them."""
        return self.key - self.key.mean(2, keepdim=True) if self.attention.averages else self.key

    @cached_property
    def query_grams(self) -> Tensor:
        """``(B, H, N, N)``"""
        return head_grams(self.query)

    @cached_property
    def key_grams(self) -> Tensor:
        """``(B, K, N, N)``"""
        return head_grams(self.key)

    @cached_property
    def key_spread_grams(self) -> Tensor:
        """``(B, K, N, N)``"""
        return head_grams(self.key_spread)

    @cached_property
    def value_grams(self) -> Tensor:
        """``(B, K, N, N)``"""
        return head_grams(self.value, exact_in_bf16=self.projected[2].dtype is torch.bfloat16)


class Projections:
    """Catches what the q/k/v projections of the current batch return."""

    def __init__(self, attention: AttentionView):
        self.attention, self.outputs = attention, []
        self._heads: list[Heads] | None = None
        self._hung = False

    def hooks(self):
        """Of the first observer that asks; the others share them."""
        if self._hung:
            return []
        self._hung = True
        return [m.register_forward_hook(lambda _, __, out: self._catch(out)) for m in self.attention.qkv_modules]

    def _catch(self, output: Tensor) -> None:
        if self._heads is not None:  # the batch before is over
            self.outputs, self._heads = [], None
        self.outputs.append(output)

    def heads(self, kwargs: dict) -> list[Heads]:
        """Of the batch that just ran, called with ``kwargs``; of a packed one those of every length of its sequences."""
        if self._heads is None:
            together = [(self.outputs, kwargs)]
            if self.attention.spec.packed:
                together = [_rows_of(rows, self.outputs, kwargs) for rows in _of_one_length(kwargs["cu_seqlens"])]
            self._heads = [Heads(self.attention, *some) for some in together]
        return self._heads


def _of_one_length(ends: Tensor) -> list[Tensor]:
    """Rows of sequences that stand one behind the other, ``(B, T)`` for every length there is.

    Args:
        ends: where each ends, behind a zero.
    """
    lengths = ends.diff()
    return [ends[:-1][lengths == T, None] + torch.arange(T, device=ends.device) for T in lengths.unique().tolist() if T]


def _rows_of(rows: Tensor, outputs: list[Tensor], kwargs: dict) -> tuple[list[Tensor], dict]:
    """Outputs and rotary tables of some rows, which are a batch then."""
    return [o[rows] for o in outputs], {"position_embeddings": tuple(t[rows] for t in kwargs["position_embeddings"])}


class HeadObserver:
    """Second moment, per head, of something that is computed of queries, keys and values."""

    def __init__(self, projections: Projections, look: Callable[[Heads], tuple[Tensor, Tensor]]):
        self.projections, self.look, self.sums = projections, look, HeadMoment()  # look: it, and its grams

    def hooks(self):
        return self.projections.hooks()

    def after(self, batch) -> None:
        for heads in self.projections.heads(batch.kwargs):
            self.sums.add(*self.look(heads))

    def finish(self) -> Moment:
        return self.sums.finish()


class ProductObserver:
    """``sum over windows of (Q^T Q) o (K~^T K~)`` per head, ``K~`` the keys minus their mean over the window."""

    def __init__(self, projections: Projections):
        self.projections, self.second, self.positions = projections, 0.0, 0.0

    def hooks(self):
        return self.projections.hooks()

    def after(self, batch) -> None:
        for heads in self.projections.heads(batch.kwargs):
            queries, keys = heads.query_grams, heads.key_spread_grams
            keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
            self.second = self.second + (queries * keys).to(accumulator(keys.device)).double().sum(0)
            samples, length = heads.projected[0].shape[:2]
            self.positions += samples * float(length) ** 2

    def finish(self) -> Moment:
        return Moment(self.positions, None, None, self.second)


class Middle:
    """The residual stream between attention and MLP; in a parallel block the input plus what attention adds; what enters a
    projector, which has no attention."""

    def __init__(self, view: BlockView):
        self.view, self._caught = view, None

    def hooks(self):
        if self.view.architecture.projects:
            return []
        if self.view.middle is not None:
            return [self.view.middle.register_forward_pre_hook(lambda _, args: self._catch(args[0]))]
        return [self.view.attention.module.register_forward_hook(lambda _, __, out: self._catch(out[0]))]

    def _catch(self, x: Tensor) -> None:
        self._caught = x

    def take(self, hidden: Tensor) -> Tensor:
        """``(B, T, D)`` of the batch ``hidden`` that just ran."""
        if self.view.architecture.projects:
            return hidden
        caught, self._caught = self._caught.view_as(hidden), None
        return hidden + caught if self.view.middle is None else caught


class FeedbackObserver:
    """What an output projection receives, with what the dense stream has and this one lacks without its output.

    Attention: the dense stream behind attention minus this block's input. MLP: the dense stream behind the block minus this
    stream behind attention. A projection that gave exactly this would repair all that was lost before it.
    """

    def __init__(self, view: BlockView, module: nn.Module, *, attention: bool):
        self.module, self.attention = module, attention
        self.middle = None if attention else Middle(view)
        self.input: Tensor | None = None
        self.sums = CrossSums()

    def hooks(self):
        mine = self.module.register_forward_pre_hook(lambda _, args: self._catch(args[0]))
        return [mine, *(self.middle.hooks() if self.middle else ())]

    def _catch(self, x: Tensor) -> None:
        self.input = x.detach()

    def after(self, batch) -> None:
        x, self.input = self.input, None
        if self.attention:
            target = batch.dense.middle.float() - batch.hidden.float()
        else:
            target = batch.dense.output.float() - self.middle.take(batch.hidden).float()
        self.sums.add(x, target)

    def finish(self) -> CrossMoment:
        return self.sums.finish()


class StreamObserver:
    """Second moment of the residual stream in front of the block, between its halves or behind it.

    Every vector is normalised as the norms of the block do, with neither scale nor shift: all tokens count alike.
    """

    def __init__(self, view: BlockView, place: Literal["input", "middle", "output"]):
        self.place, self.middle = place, Middle(view) if place == "middle" else None
        self.centres = view.architecture.norms.centres
        self.sums: VectorMoment | None = None

    def hooks(self):
        return self.middle.hooks() if self.middle else []

    def after(self, batch) -> None:
        x = {"input": batch.hidden, "output": batch.output}.get(self.place)
        x = (self.middle.take(batch.hidden) if x is None else x).float()
        if self.centres:
            x = x - x.mean(-1, keepdim=True)
        if self.sums is None:
            self.sums = VectorMoment(x.shape[-1], x.device)
        self.sums.add(x * x.square().mean(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny).rsqrt())

    def finish(self) -> Moment:
        return self.sums.finish()


class InfluenceObserver:
    """``1 - cosine`` between input and output of the block, of its attention and of its MLP (MoDeGPT Sec. 3.3, Eq. 42)."""

    def __init__(self, view: BlockView):
        self.middle, self.parallel = Middle(view), view.middle is None
        self.total, self.rows = torch.zeros(3, dtype=torch.float64), 0

    def hooks(self):
        return self.middle.hooks()

    def after(self, batch) -> None:
        hidden, output, middle = batch.hidden, batch.output, self.middle.take(batch.hidden)
        # In a parallel block each half alone moves the block's input.
        half = (hidden, output - (middle - hidden)) if self.parallel else (middle, output)
        pairs = [(hidden, output), (hidden, middle), half]
        for j, (a, b) in enumerate(pairs):
            cosine = nn.functional.cosine_similarity(a.float(), b.float(), dim=-1)
            self.total[j] += (1 - cosine).cpu().double().sum()
        self.rows += hidden.shape[0] * hidden.shape[1]

    def finish(self) -> Moment:
        return Moment(self.rows, self.total, None, None)


class ChangeObserver:
    """Squared norm of what a block adds to its input, and of its output."""

    def __init__(self):
        self.total, self.rows = torch.zeros(2, dtype=torch.float64), 0

    def hooks(self):
        return []

    def after(self, batch) -> None:
        hidden, output = batch.hidden.float(), batch.output.float()
        for j, x in enumerate((output - hidden, output)):
            self.total[j] += x.square().sum().cpu().double()
        self.rows += hidden.shape[0] * hidden.shape[1]

    def finish(self) -> Moment:
        return Moment(self.rows, self.total, None, None)


@dataclass(frozen=True)
class Scene:
    """What observers of one block are made from."""

    view: BlockView
    tokens: int  # that will go through the block
    absolute: bool
    windows: bool
    norms_behind: bool
    projections: Projections

    def layer(self, path: str) -> nn.Module:
        return self.view.module.get_submodule(path)

    def input_of(self, module: nn.Module) -> Observer:
        # A bias would be divided too, and could not take a mean then.
        norm = self.view.norm_behind(module) if self.norms_behind and getattr(module, "bias", None) is None else None
        return InputObserver(module, absolute=self.absolute, windows=self.windows, norm=norm)

    def head(self, name: str) -> Observer:
        """Of queries, keys, centred keys or values."""
        return HeadObserver(self.projections, lambda heads: (getattr(heads, name), getattr(heads, f"{name}_grams")))

    def squares(self, index: int) -> Observer:
        """Of squares over the mean square that the norm of queries (0) or keys (1) divides by."""

        def look(heads: Heads) -> tuple[Tensor, Tensor]:
            features = heads.relative_squares(index)
            return features, head_grams(features)

        return HeadObserver(self.projections, look)

    def samples(self) -> Observer:
        mlp = self.view.mlp
        return SamplesObserver(self.layer(mlp.spec.up), tokens=self.tokens, rows=SAMPLE_ROWS * mlp.hidden)


class Statistic(NamedTuple):
    """What a name stands for, and who measures it; ``None`` for a setting of others."""

    meaning: str
    observer: Callable[[Scene], Observer] | None
    until: Literal["attention", "mlp", "end"] = "attention"  # the output projection in front of which all of it is seen
    two_streams: bool = False  # compares with the dense model on the same tokens
    sequential: bool = False  # of use only on what the compressed blocks send
    part: Literal["heads", "norms", "mlp", "experts", "stream"] | None = None  # which not every block has

    def seen_in(self, view: BlockView) -> bool:
        """Whether a block has what is measured."""
        if self.part == "heads":
            return bool(view.attention.spec.qkv)
        if self.part == "stream":
            return not view.architecture.projects
        if self.part == "norms":
            return bool(view.attention.head_norms)
        return self.part is None or getattr(view, self.part) is not None


# What can be measured in a block. Methods name the ones they need.
STATISTICS: dict[str, Statistic] = {
    "attention_input": Statistic(
        "input of q, k and v", lambda s: s.input_of(s.view.attention.qkv_modules[0]), part="heads"
    ),
    "attention_output": Statistic(
        "input of the output projection", lambda s: s.input_of(s.view.attention.output_module), part="stream"
    ),
    "attention_feedback": Statistic(
        "what the dense stream has behind attention and this one lacks, with the input of the output projection",
        lambda s: FeedbackObserver(s.view, s.view.attention.output_module, attention=True),
        two_streams=True,
        part="stream",
    ),
    "mlp_input": Statistic(
        "input of up and gate", lambda s: s.input_of(s.layer(s.view.mlp.spec.up)), "mlp", part="mlp"
    ),
    "mlp_samples": Statistic(
        "rows of the input of up, for methods that iterate on activations", Scene.samples, "mlp", part="mlp"
    ),
    "mlp_hidden": Statistic(
        "input of the down projection", lambda s: s.input_of(s.layer(s.view.mlp.spec.down)), "mlp", part="mlp"
    ),
    "mlp_feedback": Statistic(
        "what the dense stream has behind the block and this one lacks behind attention, with the input of the down projection",
        lambda s: FeedbackObserver(s.view, s.layer(s.view.mlp.spec.down), attention=False),
        "mlp",
        two_streams=True,
        part="mlp",
    ),
    INPUT: Statistic("the tokens that experts receive", lambda s: ExpertInputs(s.view.experts), "end", part="experts"),
    ROUTING: Statistic(
        "what the output of each expert is multiplied with, of every token",
        lambda s: RouterWeights(s.view.experts),
        "end",
        part="experts",
    ),
    "query": Statistic("rotated queries, per head", lambda s: s.head("query"), part="heads"),
    "key": Statistic("rotated keys, per key head", lambda s: s.head("key"), part="heads"),
    "key_spread": Statistic(
        "rotated keys minus their mean over the window", lambda s: s.head("key_spread"), part="heads"
    ),
    "query_key": Statistic(
        "sum over windows of (Q^T Q) o (K~^T K~), K~ the keys minus their mean over the window, per head: the exact cost of "
        "dropping dimensions",
        lambda s: ProductObserver(s.projections),
        part="heads",
    ),
    "query_squares": Statistic(
        "squares of the queries that a q/k-norm receives, over the mean square it divides by, per head",
        lambda s: s.squares(0),
        part="norms",
    ),
    "key_squares": Statistic("the same of the keys", lambda s: s.squares(1), part="norms"),
    "value": Statistic("values, per key head", lambda s: s.head("value"), part="heads"),
    "absolute": Statistic("also the mean absolute value of every input above, for the l1 pre-conditioner", None),
    "stream_input": Statistic(
        "normalised residual stream in front of the block", lambda s: StreamObserver(s.view, "input"), sequential=True
    ),
    "stream_middle": Statistic(
        "normalised residual stream between attention and MLP",
        lambda s: StreamObserver(s.view, "middle"),
        "mlp",
        sequential=True,
    ),
    "stream_output": Statistic(
        "normalised residual stream behind the block",
        lambda s: StreamObserver(s.view, "output"),
        "end",
        sequential=True,
    ),
    "norms_behind": Statistic(
        "inputs of output and down projections over the RMS of what these make of them, where a norm stands behind them",
        None,
        sequential=True,
    ),
    "windows": Statistic("also the sum over every window of every input above, for covariances within windows", None),
    "input_energy": Statistic(
        "squares of what q, k and v, the output projection, up and gate, and the down projection receive, one behind the other",
        lambda s: EnergyObserver([s.layer(paths[0]) for paths in s.view.readers.values()]),
        "mlp",
    ),
    "influence": Statistic(
        "1 - cosine between input and output of the block, of its attention and of its MLP",
        lambda s: InfluenceObserver(s.view),
        "end",
        part="stream",
    ),
    "change": Statistic(
        "squared norms of what the block adds to its input and of its output",
        lambda _: ChangeObserver(),
        "end",
        part="stream",
    ),
}


# What a store of moments holds.
STORED = frozenset(name for name, row in STATISTICS.items() if not row.two_streams and not row.sequential)


def observers_for(view: BlockView, statistics: set[str], tokens: int) -> dict[str, Observer]:
    """Name -> observer of a block, for the statistics wanted.

    Args:
        tokens: how many will go through the block.
    """
    absolute, windows, norms = (name in statistics for name in ("absolute", "windows", "norms_behind"))
    scene = Scene(view, tokens, absolute, windows, norms, Projections(view.attention))
    rows = {name: row for name, row in STATISTICS.items() if name in statistics and row.seen_in(view)}
    return {name: row.observer(scene) for name, row in rows.items() if row.observer}
