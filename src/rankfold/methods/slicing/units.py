"""The two things in a block that consist of units which can go one by one, read in one way.

Shape legend: n units, c channels each sends into the output projection, D model width.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...architectures import AttentionView, BlockView, Dense, MLPView
from ...linalg.slicing import channels_of
from ..base import BlockResult
from ..result import put_attention, put_projection

__all__ = ["HeadGroups", "HiddenUnits", "Sliceable", "sliceable"]


@dataclass(frozen=True)
class Sliceable:
    """Units that feed one output projection."""

    statistic: str  # of the input of the output projection
    count: int  # n
    channels: int  # c
    output: Dense  # (D, n c)
    per_unit: int  # weights
    biases: int  # of all units together, the output's not among them

    def parts(self) -> list[Tensor]:
        """Weights by unit, each ``(n, ...)``."""
        raise NotImplementedError

    def put(self, result: BlockResult, keep: Tensor, output: Dense) -> None:
        """Replace the layers by those of the units ``keep``.

        Args:
            output: ``(D, r c)``.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class HiddenUnits(Sliceable):
    """Hidden units of an MLP."""

    mlp: MLPView

    def parts(self) -> list[Tensor]:
        rising = [
            part for p in self.mlp.rising().values() for part in p.weight.split(self.count)
        ]  # a fused gate is two
        return [*rising, self.output.weight.T]

    def put(self, result: BlockResult, keep: Tensor, output: Dense) -> None:
        for path, projection in self.mlp.rising().items():
            put_projection(result, path, projection.rows(self.mlp.rows_of(keep)))
        put_projection(result, self.mlp.spec.down, output)


@dataclass(frozen=True)
class HeadGroups(Sliceable):
    """Key/value heads, each with the query heads that read it."""

    attention: AttentionView

    def parts(self) -> list[Tensor]:
        q, k, v = (projection.weight.unflatten(0, (self.count, -1)) for projection in self.attention.qkv())
        return [q, k, v, self.output.weight.T.unflatten(0, (self.count, -1))]

    def put(self, result: BlockResult, keep: Tensor, output: Dense) -> None:
        attention, width = self.attention, self.attention.head_dim
        queries = channels_of(keep, self.channels)
        q, k, v = attention.qkv()
        rows = {"q": q.rows(queries), "k": k.rows(channels_of(keep, width)), "v": v.rows(channels_of(keep, width))}
        fewer = replace(attention, heads=len(queries) // width, kv_heads=len(keep))
        put_attention(result, fewer, rows | {"o": output}, width, width)


def sliceable(view: BlockView) -> dict[str, Sliceable]:
    """What of a block consists of units, by the name of the module."""
    attention, mlp, found = view.attention, view.mlp, {}
    if mlp is not None:
        rising, down, hidden = mlp.rising().values(), mlp.down, mlp.hidden
        weights = down.weight.shape[0] + sum(p.weight.numel() for p in rising) // hidden
        found["mlp"] = HiddenUnits("mlp_hidden", hidden, 1, down, weights, _biases(rising), mlp)
    groups, output = attention.kv_heads, attention.output
    channels = output.weight.shape[1] // groups
    weights = 2 * (channels + attention.head_dim) * output.weight.shape[0]
    biases = _biases(attention.qkv())
    found["heads"] = HeadGroups("attention_output", groups, channels, output, weights, biases, attention)
    return found


def _biases(projections) -> int:
    return sum(p.bias.numel() for p in projections if p.bias is not None)


def complement(keep: Tensor, count: int) -> Tensor:
    """``(n - r,)`` ascending: the units that go."""
    gone = torch.ones(count, dtype=torch.bool, device=keep.device)
    gone[keep] = False
    return gone.nonzero()[:, 0]
