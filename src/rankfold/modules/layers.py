"""From a description to a linear layer."""

from torch import nn

from .latent import LatentLinear, SplitHeadLinear
from .sparse import SparseLinear

__all__ = ["LAYERS", "build_layer", "check_description"]

_SIZES = ("in", "out", "rank", "heads", "kv_heads", "qk_dim", "vo_dim", "bits", "chunk", "nonzeros", "head_identity")
_SIZES += ("width", "before", "inside", "behind", "experts")
_MAY_BE_ZERO = {"linear": ("in", "out"), "attention": ("qk_dim", "vo_dim"), "packed_attention": ("qk_dim", "vo_dim")}


class NoWeights(nn.Linear):
    """A bias, or nothing: there is no weight to initialise, of which ``nn.Linear`` warns."""

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def _linear(spec: dict) -> nn.Module:
    kind = nn.Linear if spec["in"] and spec["out"] else NoWeights
    return kind(spec["in"], spec["out"], bias=spec["bias"])


LAYERS = {"linear": _linear, "latent": LatentLinear, "split_head": SplitHeadLinear, "sparse": SparseLinear}


def check_description(spec: dict, kinds) -> None:
    """Raise :class:`ValueError` where the kind is none of ``kinds``, or a size is no positive integer.

    Widths of plain layers and of attention may be 0: a module of which nothing is left but a bias.
    """
    kind = spec.get("kind")
    if kind not in kinds:
        raise ValueError(f"unknown module kind {kind!r}; this version of rankfold reads: {', '.join(sorted(kinds))}")
    for key in _SIZES:
        least = 0 if key in _MAY_BE_ZERO.get(kind, ()) else 1
        if key in spec and not (isinstance(spec[key], int) and least <= spec[key] < 2**31):
            allowed = "a positive integer" if least else "an integer that is not negative"
            raise ValueError(f"{key!r} of a {kind} module must be {allowed}, got {spec[key]!r}")


def build_layer(spec: dict) -> nn.Module:
    """The layer a description stands for; weights are uninitialised.

    Raises:
        ValueError: see :func:`check_description`.
    """
    check_description(spec, LAYERS)
    return LAYERS[spec["kind"]](spec)
