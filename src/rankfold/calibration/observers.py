"""What watches a block while batches go through it, and the observers of what enters its layers.

Shape legend: B sequences of a batch, T tokens, D model width.

An observer hangs hooks on a block, sees one batch after another, and ends as a moment. Those of queries, keys and
values are in ``heads.py``, those of the residual stream in ``residual.py``, those of experts in ``experts.py``; which
statistic takes which is the table in ``statistics.py``.
"""

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._utils.stopwatch import time_spent
from ..architectures import Norm, read_linear
from .moments import CrossMoment, CrossSums, Moment, Samples, VectorMoment, accumulator


class RanBatch(NamedTuple):
    """What went through a block."""

    hidden: Tensor  # (B, T, D)
    kwargs: dict  # what the block was called with
    output: Tensor | Any  # (B, T, D), where the forward was not cut short; None elsewhere
    dense: "DenseBatch | Any" = None  # the same tokens in the dense model, where a second stream carries them


class DenseBatch(NamedTuple):
    """The dense model's residual stream for one batch."""

    middle: Tensor  # (B, T, D) between attention and MLP
    output: Tensor  # (B, T, D) behind the block
    inputs: Mapping[str, Tensor] = MappingProxyType({})  # statistic of an input -> (..., N), of those that are compared


class Observer:
    """Sees every batch that goes through one block; ``sums`` is what it adds to, by default."""

    sums: Any

    def hooks(self) -> Iterable:
        """Hang hooks on the block; returns their handles."""
        return ()

    def after(self, batch: RanBatch) -> None:
        """A batch has run."""

    def finish(self) -> Moment | CrossMoment:
        """What was measured."""
        return self.sums.finish()


class InputObserver(Observer):
    """Second moment of what enters a layer, and where wanted the sum over every window.

    Args:
        norm: that the layer's output goes through; what enters is then divided by the RMS of that output.
    """

    def __init__(self, module: nn.Module, *, absolute: bool, windows: bool, norm: Norm | None = None):
        self.module, self.norm, self.sums = module, norm, VectorMoment(absolute=absolute)
        self.windows: list[Tensor] | Any = [] if windows else None
        self.lengths: list[int] = []  # of the windows
        self._entered: Tensor | Any = None  # of this batch; some families flatten it before the layer

    def hooks(self):
        return [self.module.register_forward_pre_hook(lambda _, args: self._add(args[0]))]

    @time_spent("moments")
    def _add(self, x: Tensor) -> None:
        if self.norm is not None:
            x = x.float() / rms_after(self.module, x, self.norm)
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


def rms_after(layer: nn.Module, x: Tensor, norm: Norm) -> Tensor:
    """``(..., 1)`` what a norm behind a layer divides by, for every row of ``x`` ``(..., N)``."""
    return rms(nn.functional.linear(x.detach(), read_linear(layer).weight.to(x.dtype)), norm)


def rms(x: Tensor, norm: Norm) -> Tensor:
    """``(..., 1)`` what a norm divides ``x`` ``(..., D)`` by."""
    return (x.float().square().mean(-1, keepdim=True) + norm.eps).sqrt()


class EnergyObserver(Observer):
    """Squares of what enters some layers, one layer's inputs behind the other's."""

    def __init__(self, modules: list[nn.Module]):
        self.modules, self.totals, self.rows = modules, [torch.zeros(())] * len(modules), 0

    def hooks(self):
        return [m.register_forward_pre_hook(functools.partial(self._add, i)) for i, m in enumerate(self.modules)]

    @time_spent("moments")
    def _add(self, layer: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        squares = args[0].detach().flatten(0, -2).float().square().sum(0)
        self.totals[layer] = self.totals[layer] + squares.to(accumulator(squares.device)).double()

    def after(self, batch) -> None:
        self.rows += batch.hidden.shape[0] * batch.hidden.shape[1]

    def finish(self) -> Moment:
        return Moment(self.rows, torch.cat(self.totals))


class SamplesObserver(Observer):
    """Rows of what enters a layer, spread evenly over all tokens."""

    def __init__(self, module: nn.Module, *, tokens: int, rows: int, first: int = 0):
        self.module, self.sums = module, Samples(max(1, tokens // rows), first)

    def hooks(self):
        return [self.module.register_forward_pre_hook(lambda _, args: self.sums.add(args[0]))]


class LayerInput:
    """What enters a layer, of the batch that ran last."""

    def __init__(self, module: nn.Module):
        self.module = module
        self._caught: Tensor | Any = None

    def hooks(self):
        return [self.module.register_forward_pre_hook(lambda _, args: self._catch(args[0]))]

    def _catch(self, x: Tensor) -> None:
        self._caught = x.detach()

    def take(self) -> Tensor:
        """Return it, ``(..., N)``, and forget it."""
        caught, self._caught = self._caught, None
        return caught


class DenseInputObserver(Observer):
    """What enters a layer, with what it lacks of the input in the dense model; exactly nothing where both are the same.

    Args:
        name: statistic of that input.
    """

    def __init__(self, module: nn.Module, name: str):
        self.input, self.name, self.sums = LayerInput(module), name, CrossSums()

    def hooks(self):
        return self.input.hooks()

    def after(self, batch) -> None:
        x = self.input.take()
        self.sums.add(x, batch.dense.inputs[self.name].float() - x.float())
