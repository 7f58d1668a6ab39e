"""What can be measured in a block: one observer a statistic, in one table.

Shape legend: B sequences of a batch, T tokens, D model width, H query heads, K key heads, N head dimension.

An observer hangs hooks on a block, sees one batch after another, and ends as a moment. A new statistic is one class (or one
more row with an old one) in :data:`STATISTICS`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..architectures import AttentionView, BlockView
from .moments import HeadMoment, Moment, Samples, VectorMoment, accumulator, head_grams, heads_first

__all__ = ["SAMPLE_ROWS", "STATISTICS", "Observer", "Statistic", "observers_for"]

SAMPLE_ROWS = 8  # rows of `mlp_samples` kept for every hidden unit; fits on fewer remember them (docs/papers.md)


class Observer(Protocol):
    """Sees every batch that goes through one block."""

    def hooks(self) -> Iterable:
        """Hang hooks on the block; returns their handles."""

    def after(self, hidden: Tensor, kwargs: dict, output: Tensor | None) -> None:
        """The batch ``hidden`` ``(B, T, D)`` has run, called with ``kwargs``; no ``output`` where the forward was cut short."""

    def finish(self) -> Moment:
        """What was measured."""


class InputObserver:
    """Second moment of what enters a layer."""

    def __init__(self, module: nn.Module, *, absolute: bool):
        self.module, self.absolute = module, absolute
        self.sums: VectorMoment | None = None

    def hooks(self):
        return [self.module.register_forward_pre_hook(lambda _, args: self._add(args[0]))]

    def _add(self, x: Tensor) -> None:
        if self.sums is None:
            self.sums = VectorMoment(x.shape[-1], x.device, absolute=self.absolute)
        self.sums.add(x)

    def after(self, hidden, kwargs, output) -> None:
        pass

    def finish(self) -> Moment:
        return self.sums.finish()


class SamplesObserver:
    """Rows of what enters a layer, spread evenly over all tokens."""

    def __init__(self, module: nn.Module, *, tokens: int, rows: int):
        self.module, self.samples = module, Samples(max(1, tokens // rows))

    def hooks(self):
        return [self.module.register_forward_pre_hook(lambda _, args: self.samples.add(args[0]))]

    def after(self, hidden, kwargs, output) -> None:
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

    @cached_property
    def rotated(self) -> tuple[Tensor, Tensor]:
        """Queries ``(B, H, T, N)`` and keys ``(B, K, T, N)``, after norm and rotation."""
        attention, (query, key, _) = self.attention, self.projected
        if attention.norms:
            q_norm, k_norm = (getattr(attention.module, name) for name in attention.norms)
            query, key = q_norm(query), k_norm(key)
        query, key = heads_first(query), heads_first(key)
        if attention.rotary_dim:
            half = attention.rotary_dim // 2
            cos, sin = (t[:, None, :, :half] for t in self.kwargs["position_embeddings"])  # (B, 1, T, half)
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
        """Keys minus their mean over the window: softmax ignores a shift that all keys of a query share."""
        return self.key - self.key.mean(2, keepdim=True)

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
        self._heads: Heads | None = None
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

    def heads(self, kwargs: dict) -> Heads:
        """Of the batch that just ran, called with ``kwargs``."""
        if self._heads is None:
            self._heads = Heads(self.attention, self.outputs, kwargs)
        return self._heads


class HeadObserver:
    """Second moment of queries, keys, centred keys or values, per head."""

    def __init__(self, projections: Projections, name: str):
        self.projections, self.name, self.sums = projections, name, HeadMoment()

    def hooks(self):
        return self.projections.hooks()

    def after(self, hidden, kwargs, output) -> None:
        heads = self.projections.heads(kwargs)
        self.sums.add(getattr(heads, self.name), getattr(heads, f"{self.name}_grams"))

    def finish(self) -> Moment:
        return self.sums.finish()


class ProductObserver:
    """``sum over windows of (Q^T Q) o (K~^T K~)`` per head, ``K~`` the keys minus their mean over the window."""

    def __init__(self, projections: Projections):
        self.projections, self.second, self.positions = projections, 0.0, 0.0

    def hooks(self):
        return self.projections.hooks()

    def after(self, hidden, kwargs, output) -> None:
        heads = self.projections.heads(kwargs)
        queries, keys = heads.query_grams, heads.key_spread_grams
        keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
        self.second = self.second + (queries * keys).to(accumulator(keys.device)).double().sum(0)
        self.positions += hidden.shape[0] * float(hidden.shape[1]) ** 2

    def finish(self) -> Moment:
        return Moment(self.positions, None, None, self.second)


class InfluenceObserver:
    """``1 - cosine`` between input and output of the block, of its attention and of its MLP (MoDeGPT Sec. 3.3, Eq. 42)."""

    def __init__(self, view: BlockView):
        self.view, self.seen = view, {}
        self.total, self.rows = torch.zeros(3, dtype=torch.float64), 0

    def hooks(self):
        if self.view.middle is not None:
            return [self.view.middle.register_forward_pre_hook(lambda _, args: self.seen.update(middle=args[0]))]
        attention = self.view.attention.module
        return [attention.register_forward_hook(lambda _, __, out: self.seen.update(attention=out[0]))]

    def after(self, hidden, kwargs, output) -> None:
        if "middle" in self.seen:
            middle = self.seen.pop("middle").view_as(hidden)
            pairs = [(hidden, output), (hidden, middle), (middle, output)]
        else:  # parallel: each half alone moves the block's input
            attention = self.seen.pop("attention")
            pairs = [(hidden, output), (hidden, hidden + attention), (hidden, output - attention)]
        for j, (a, b) in enumerate(pairs):
            cosine = nn.functional.cosine_similarity(a.float(), b.float(), dim=-1)
            self.total[j] += (1 - cosine).cpu().double().sum()
        self.rows += hidden.shape[0] * hidden.shape[1]

    def finish(self) -> Moment:
        return Moment(self.rows, self.total, None, None)


@dataclass(frozen=True)
class Scene:
    """What observers of one block are made from."""

    view: BlockView
    tokens: int  # that will go through the block
    absolute: bool
    projections: Projections

    def layer(self, path: str) -> nn.Module:
        return self.view.module.get_submodule(path)

    def input_of(self, module: nn.Module) -> Observer:
        return InputObserver(module, absolute=self.absolute)

    def head(self, name: str) -> Observer:
        return HeadObserver(self.projections, name)

    def samples(self) -> Observer:
        mlp = self.view.mlp
        return SamplesObserver(self.layer(mlp.spec.up), tokens=self.tokens, rows=SAMPLE_ROWS * mlp.hidden)


class Statistic(NamedTuple):
    """What a name stands for, and who measures it; ``None`` for a setting of others."""

    meaning: str
    observer: Callable[[Scene], Observer] | None


# What can be measured in a block. Methods name the ones they need.
STATISTICS: dict[str, Statistic] = {
    "attention_input": Statistic("input of q, k and v", lambda s: s.input_of(s.view.attention.qkv_modules[0])),
    "attention_output": Statistic(
        "input of the output projection", lambda s: s.input_of(s.view.attention.output_module)
    ),
    "mlp_input": Statistic("input of up and gate", lambda s: s.input_of(s.layer(s.view.mlp.spec.up))),
    "mlp_samples": Statistic("rows of the input of up, for methods that iterate on activations", Scene.samples),
    "mlp_hidden": Statistic("input of the down projection", lambda s: s.input_of(s.layer(s.view.mlp.spec.down))),
    "query": Statistic("rotated queries, per head", lambda s: s.head("query")),
    "key": Statistic("rotated keys, per key head", lambda s: s.head("key")),
    "key_spread": Statistic("rotated keys minus their mean over the window", lambda s: s.head("key_spread")),
    "query_key": Statistic(
        "sum over windows of (Q^T Q) o (K~^T K~), K~ the keys minus their mean over the window, per head: the exact cost of "
        "dropping dimensions",
        lambda s: ProductObserver(s.projections),
    ),
    "value": Statistic("values, per key head", lambda s: s.head("value")),
    "absolute": Statistic("also the mean absolute value of every input above, for the l1 pre-conditioner", None),
    "influence": Statistic(
        "1 - cosine between input and output of the block, of its attention and of its MLP",
        lambda s: InfluenceObserver(s.view),
    ),
}


def observers_for(view: BlockView, statistics: set[str], tokens: int) -> dict[str, Observer]:
    """Name -> observer of a block, for the statistics wanted.

    Args:
        tokens: how many will go through the block.
    """
    scene = Scene(view, tokens, "absolute" in statistics, Projections(view.attention))
    rows = {name: row for name, row in STATISTICS.items() if name in statistics}
    return {name: row.observer(scene) for name, row in rows.items() if row.observer}
