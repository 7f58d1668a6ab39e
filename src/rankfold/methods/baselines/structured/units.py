"""The two things in a block that consist of units which can go one by one, read in one way.

Shape legend: n units, c rows of a layer or channels of the output projection that belong to each, D model width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ....architectures import AttentionView, BlockView, Dense, MLPView, read_linear
from ....linalg.slicing import channels_of
from ...base import BlockResult
from ...result import put_attention, put_projection


class Rows(NamedTuple):
    """Rows of one layer that make what units send."""

    layer: str  # a name of `BlockView.layers`
    index: Tensor  # (n, c) rows of each unit


@dataclass(frozen=True)
class Sliceable:
    """Units that feed one output projection."""

    statistic: str  # of the input of the output projection
    entering: str  # statistic of the input of the layers before it
    count: int  # n
    channels: int  # c of the output projection, those of a unit side by side
    rows: tuple[Rows, ...]
    last: str  # name of the output projection
    layers: Mapping[str, Dense]  # that and the layers before it, by name

    @property
    def output(self) -> Dense:
        """``(D, n c)``."""
        return self.layers[self.last]

    @property
    def per_unit(self) -> int:
        """Weights of a unit."""
        before = sum(index.shape[1] * self.layers[layer].weight.shape[1] for layer, index in self.rows)
        return before + self.channels * self.output.weight.shape[0]

    @property
    def biases_per_unit(self) -> int:
        """The output's are not among them."""
        return sum(index.shape[1] for layer, index in self.rows if self.layers[layer].bias is not None)

    def columns(self) -> Tensor:
        """``(n, c)`` channels of each unit in the output projection."""
        return torch.arange(self.count * self.channels, device=self.output.weight.device).view(self.count, -1)

    def parts(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """``(n, c, ...)`` what belongs to each unit, of tensors shaped as the weights, by the names of the layers."""
        before = [tensors[layer][index] for layer, index in self.rows]
        return [*before, tensors[self.last].T.unflatten(0, (self.count, -1))]

    def weights(self) -> list[Tensor]:
        """:meth:`parts` of the weights."""
        return self.parts({name: layer.weight for name, layer in self.layers.items()})

    def put(self, result: BlockResult, keep: Tensor, output: Dense) -> None:
        """Replace the layers by those of the units ``keep``, and the output projection by ``output`` ``(D, r c)``."""
        raise NotImplementedError


@dataclass(frozen=True)
class HiddenUnits(Sliceable):
    """Hidden units of an MLP."""

    mlp: MLPView

    def put(self, result: BlockResult, keep: Tensor, output: Dense) -> None:
        for path, projection in self.mlp.rising().items():
            put_projection(result, path, projection.rows(self.mlp.rows_of(keep)))
        put_projection(result, self.mlp.spec.down, output)


@dataclass(frozen=True)
class HeadGroups(Sliceable):
    """Key/value heads, each with the query heads that read it."""

    attention: AttentionView

    @property
    def biases_per_unit(self) -> int:
        """Sinks, of which every query head has one, among them."""
        sinks = self.attention.heads // self.count if self.attention.sinks is not None else 0
        return super().biases_per_unit + sinks

    def put(self, result: BlockResult, keep: Tensor, output: Dense) -> None:
        attention, width = self.attention, self.attention.head_dim
        queries = channels_of(keep, self.channels)
        q, k, v = attention.qkv()
        rows = {"q": q.rows(queries), "k": k.rows(channels_of(keep, width)), "v": v.rows(channels_of(keep, width))}
        fewer = replace(attention, heads=len(queries) // width, kv_heads=len(keep))
        put_attention(result, fewer, rows | {"o": output}, width, width)
        if attention.sinks is not None:
            result.state[f"{attention.spec.path}.sinks"] = attention.sinks[queries[::width] // width]


def sliceable(view: BlockView) -> dict[str, Sliceable]:
    """What of a block consists of units, by the name of the module."""
    attention, mlp, found = view.attention, view.mlp, {}
    layers = {name: read_linear(layer) for name, layer in view.layers.items()}
    if mlp is not None:
        mine = {name: layer for name, layer in layers.items() if name in ("gate", "up", "down")}
        rows = [
            Rows(name, part) for name in mine if name != "down" for part in _rows(mine[name]).view(-1, mlp.hidden, 1)
        ]
        found["mlp"] = HiddenUnits("mlp_hidden", "mlp_input", mlp.hidden, 1, tuple(rows), "down", mine, mlp)
    if attention.spec.qkv:
        found["heads"] = _heads(attention, layers)
    return found


def _heads(attention: AttentionView, layers: dict[str, Dense]) -> HeadGroups:
    groups = attention.kv_heads
    mine = {name: layer for name, layer in layers.items() if name in ("q", "k", "v", "qkv", "o")}
    rows = [Rows(layer, index.view(groups, -1)) for layer, index in attention.qkv_rows().values()]
    channels = layers["o"].weight.shape[1] // groups
    return HeadGroups("attention_output", "attention_input", groups, channels, tuple(rows), "o", mine, attention)


def _rows(layer: Dense) -> Tensor:
    return torch.arange(len(layer.weight), device=layer.weight.device)
