"""One reading of a norm, whatever its family calls its numbers."""

from dataclasses import dataclass

from torch import Tensor, nn

EPS = 1e-5  # of norms that keep no number of their own


@dataclass(frozen=True)
class Norm:
    """``scale * x / sqrt(mean(x^2) + eps) + shift``, of ``x`` minus its mean in a LayerNorm."""

    scale: Tensor | None  # (D,)
    shift: Tensor | None  # (D,)
    eps: float
    is_layernorm: bool


def read_norm(module: nn.Module, *, offset: float, is_layernorm: bool) -> Norm:
    """A LayerNorm or RMSNorm, as the families write them.

    Args:
        offset: what it adds to its weight to get its scale.
        is_layernorm: whether it subtracts the mean; else an RMSNorm.
    """
    weight, shift = getattr(module, "weight", None), getattr(module, "bias", None)
    scale = None if weight is None else weight.detach() + offset
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", EPS))
    return Norm(scale, None if shift is None else shift.detach(), eps, is_layernorm)
