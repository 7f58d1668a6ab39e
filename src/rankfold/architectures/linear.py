"""One reading of a linear layer, whatever its family calls it and however it stores its weight."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Dense:
    """A linear map as ``nn.Linear`` stores it."""

    weight: Tensor  # (out, in)
    bias: Tensor | None  # (out,)

    def rows(self, index) -> "Dense":
        return Dense(self.weight[index], None if self.bias is None else self.bias[index])


def read_linear(module: Any) -> Dense:
    """``(out, in)`` view of a Linear, a subclass of it, or transformers' ``Conv1D`` (stored transposed); no copy."""
    weight, bias = module.weight.detach(), module.bias
    return Dense(weight if isinstance(module, nn.Linear) else weight.T, None if bias is None else bias.detach())


def as_stored(module: nn.Module, weight: Tensor) -> Tensor:
    """What :func:`read_linear` reads as ``weight`` ``(out, in)``, contiguous in the layer's own layout."""
    return (weight if isinstance(module, nn.Linear) else weight.T).contiguous()
