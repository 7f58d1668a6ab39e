"""Observers of queries, keys and values, as they meet.

Shape legend: B sequences of a batch, T tokens, H query heads, K key heads, N head dimension.
"""

from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from ..architectures import AttentionView
from ..linalg.mean_square import square_features
from ..modules.kernels import grown_at, of_one_length
from .moments import HeadMoment, Moment, accumulator, head_grams, heads_first
from .observers import Observer


class Heads:
    """Queries, keys and values of one batch as they meet, fp32; each is computed once, for all observers that ask."""

    def __init__(self, attention: AttentionView, outputs: list[Tensor], kwargs: dict):
        self.attention, self.kwargs = attention, kwargs
        self.projected = attention.split_states(outputs)  # (B, T, H or K, N)
        self._grams: dict[str, Tensor] = {}

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
        """Queries ``(B, H, T, N)`` and keys ``(B, K, T, N)``, after norm and rotation, as they meet."""
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
        factor, step = attention.growth
        if factor:
            query = query * grown_at(self.kwargs["position_ids"], factor, step).transpose(1, 2)
        return query, key

    @property
    def query(self) -> Tensor:
        return self.rotated[0]

    @property
    def key(self) -> Tensor:
        return self.rotated[1]

    @cached_property
    def key_spread(self) -> Tensor:
        """Keys minus their mean over the window: softmax ignores a shift that all keys of a query share, unless a sink
        stands beside them."""
        return self.key - self.key.mean(2, keepdim=True) if self.attention.averages else self.key

    def grams(self, name: str) -> Tensor:
        """``(B, H or K, N, N)`` of ``query``, ``key``, ``key_spread`` or ``value``."""
        if name not in self._grams:
            exact = name == "value" and self.projected[2].dtype is torch.bfloat16
            self._grams[name] = head_grams(getattr(self, name), exact_in_bf16=exact)
        return self._grams[name]


class Projections:
    """Catches what the q/k/v projections of the current batch return."""

    def __init__(self, attention: AttentionView):
        self.attention = attention
        self.outputs: dict[int, Tensor] = {}  # by the place of the projection, whatever the order of the calls
        self._heads: list[Heads] | None = None
        self._hung = False

    def hooks(self):
        """Of the first observer that asks; the others share them."""
        if self._hung:
            return []
        self._hung = True
        return [
            m.register_forward_hook(partial(self._catch, place)) for place, m in enumerate(self.attention.qkv_modules)
        ]

    def _catch(self, place: int, _: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
        if self._heads is not None:  # the batch before is over
            self.outputs, self._heads = {}, None
        self.outputs[place] = output

    def heads(self, kwargs: dict) -> list[Heads]:
        """Of the batch that just ran, called with ``kwargs``; of a packed one those of each length of its sequences."""
        if self._heads is None:
            outputs = [self.outputs[place] for place in sorted(self.outputs)]
            together = [(outputs, kwargs)]
            if self.attention.spec.packed:
                together = [_rows_of(rows, outputs, kwargs) for rows in of_one_length(kwargs["cu_seqlens"])]
            self._heads = [Heads(self.attention, *some) for some in together]
        return self._heads


def _rows_of(rows: Tensor, outputs: list[Tensor], kwargs: dict) -> tuple[list[Tensor], dict]:
    """Outputs and rotary tables of some rows, which are a batch then."""
    return [o[rows] for o in outputs], {"position_embeddings": tuple(t[rows] for t in kwargs["position_embeddings"])}


class HeadObserver(Observer):
    """Second moment, per head, of something that is computed of queries, keys and values."""

    def __init__(self, projections: Projections, look: Callable[[Heads], tuple[Tensor, Tensor]]):
        self.projections, self.look, self.sums = projections, look, HeadMoment()  # look: it, and its grams

    def hooks(self):
        return self.projections.hooks()

    def after(self, batch) -> None:
        for heads in self.projections.heads(batch.kwargs):
            self.sums.add(*self.look(heads))


class ProductObserver(Observer):
    """``sum over windows of (Q^T Q) o (K~^T K~)`` per head, ``K~`` the keys minus their mean over the window."""

    def __init__(self, projections: Projections):
        self.projections, self.second, self.pairs = projections, torch.zeros(()), 0.0

    def hooks(self):
        return self.projections.hooks()

    def after(self, batch) -> None:
        for heads in self.projections.heads(batch.kwargs):
            queries, keys = heads.grams("query"), heads.grams("key_spread")
            keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
            self.second = self.second + (queries * keys).to(accumulator(keys.device)).double().sum(0)
            samples, length = heads.projected[0].shape[:2]
            self.pairs += samples * float(length) ** 2

    def finish(self) -> Moment:
        return Moment(self.pairs, second=self.second)
