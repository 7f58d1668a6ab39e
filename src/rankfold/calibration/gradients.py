"""What a backward pass can measure in a block: one observer a statistic, in one table.

Shape legend: B sequences of a batch, T tokens, O outputs and I inputs of a layer.

The gradients are of the summed loss of a sequence. A statistic of them is a sum over tokens or sequences, as all others
are. The diagonal of the empirical Fisher is one of sequences: ``E[(dL_s / dW)^2]`` with ``L_s`` the loss of a whole
sequence, as FWSVD and LLM-Pruner (arXiv:2207.00112, arXiv:2305.11627) sum it over examples. "Empirical" says that the
loss is that of the tokens of the text and not of tokens drawn from the model (Kunstner et al., arXiv:1905.12558).
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from ..architectures import BlockView, Norm, read_linear
from .moments import Moment, VectorMoment, accumulator, cross
from .observers import rms_after


class BackwardObserver(Protocol):
    """Sees what enters one layer of a block, and the gradient of the loss at its output, batch after batch."""

    layer: nn.Module

    def add(self, x: Tensor, g: Tensor) -> None:
        """``x`` ``(B, T, I)`` and ``g`` ``(B, T, O)`` of one batch."""

    def finish(self) -> Moment:
        """What was measured."""
        ...


class OutputGradient:
    """Second moment ``E[g g^T]`` over tokens of the gradient ``g`` at the output of a layer, about zero.

    Args:
        norm: that the layer's output goes through; the gradient is then multiplied by the RMS of that output.
    """

    def __init__(self, layer: nn.Module, norm: Norm | None = None):
        self.layer, self.norm, self.sums = layer, norm, VectorMoment()

    def add(self, x: Tensor, g: Tensor) -> None:
        if self.norm is not None:
            g = g.float() * rms_after(self.layer, x, self.norm)
        self.sums.add(g)

    def finish(self) -> Moment:
        return self.sums.finish()

    @staticmethod
    def numbers(out: int, wide: int) -> int:
        return out * out


class WeightGradient:
    """Gradient ``(O, I)`` of the weight of a layer, summed over sequences."""

    def __init__(self, layer: nn.Module):
        self.layer, self.sequences, self.total = layer, 0, None

    def add(self, x: Tensor, g: Tensor) -> None:
        self._add(cross(g.flatten(0, 1), x.flatten(0, 1)), len(x))

    def _add(self, sums: Tensor, sequences: int) -> None:
        if self.total is None:
            self.total = torch.zeros(sums.shape, dtype=torch.float64, device=accumulator(sums.device))
        self.total += sums.to(self.total.device)
        self.sequences += sequences

    def finish(self) -> Moment:
        return Moment(self.sequences, self.total)

    @staticmethod
    def numbers(out: int, wide: int) -> int:
        return out * wide


class BiasGradient(WeightGradient):
    """Gradient ``(O,)`` of the bias that a layer has or could have, summed over sequences."""

    def add(self, x: Tensor, g: Tensor) -> None:
        self._add(g.detach().float().sum((0, 1)), len(x))

    @staticmethod
    def numbers(out: int, wide: int) -> int:
        return out


class Fisher(WeightGradient):
    """Diagonal ``(O, I)`` of the empirical Fisher of the weight of a layer: squares of the gradients of single
    sequences.

    The gradient of one sequence is there at a time.
    """

    def add(self, x: Tensor, g: Tensor) -> None:
        for one, gradient in zip(x, g, strict=True):
            self._add(cross(gradient, one).square_(), 1)


LAYERS = ("q", "k", "v", "qkv", "o", "gate", "up", "down")  # as `BlockView.layers` names them; a block has some of them
KINDS = {
    "gradient": OutputGradient,
    "weight_gradient": WeightGradient,
    "bias_gradient": BiasGradient,
    "fisher": Fisher,
}
# What a backward pass can measure in a block: name -> layer and observer. Methods name the ones they need; with
# "norms_after" among the names, errors at an output count relative to it where a norm follows.
GRADIENTS: dict[str, tuple[str, type]] = {
    f"{layer}_{kind}": (layer, observer) for layer in LAYERS for kind, observer in KINDS.items()
}


def gradient_observers(names: set[str]) -> Callable[[BlockView], dict[str, BackwardObserver]]:
    """Block -> name -> observer, for names out of :data:`GRADIENTS`."""

    def observer(view: BlockView, name: str) -> BackwardObserver:
        place, kind = GRADIENTS[name]
        layer = view.layers[place]
        if kind is OutputGradient and "norms_after" in names:
            return OutputGradient(layer, view.norm_after(layer))
        return kind(layer)

    return lambda view: {name: observer(view, name) for name in GRADIENTS if name in names}


def numbers(view: BlockView, names: set[str]) -> int:
    """How many numbers these statistics of a block hold; weights may be on the meta device."""
    return sum(observer.numbers(*_shape(view, layer)) for layer, observer in _rows(names))


def widest(view: BlockView, names: set[str]) -> int:
    """The most outputs of a layer that one of these statistics looks at; 0 where there are none."""
    return max((_shape(view, layer)[0] for layer, _ in _rows(names)), default=0)


def _rows(names: set[str]) -> list[tuple[str, type]]:
    return [row for name, row in GRADIENTS.items() if name in names]


def _shape(view: BlockView, layer: str) -> tuple[int, int]:
    out, wide = read_linear(view.layers[layer]).weight.shape
    return out, wide
