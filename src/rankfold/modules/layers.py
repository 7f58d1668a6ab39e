"""From a description to a linear layer."""

from torch import nn

from .latent import LatentLinear, SplitHeadLinear
from .sparse import SparseLinear

__all__ = ["LAYERS", "build_layer", "check_description"]

_SIZES = ("in", "out", "rank", "heads", "kv_heads", "qk_dim", "vo_dim", "bits", "chunk", "nonzeros", "head_identity")
_SIZES += ("width", "before", "inside", "behind")


def _linear(spec: dict) -> nn.Module:
    return nn.Linear(spec["in"], spec["out"], bias=spec["bias"])


LAYERS = {"linear": _linear, "latent": LatentLinear, "split_head": SplitHeadLinear, "sparse": SparseLinear}


def check_description(spec: dict, kinds) -> None:
    """Raise :class:`ValueError` where the kind is none of ``kinds``, or a size is no positive integer."""
    kind = spec.get("kind")
    if kind not in kinds:
        raise ValueError(f"unknown module kind {kind!r}; this version of rankfold reads: {', '.join(sorted(kinds))}")
    for key in _SIZES:
        if key in spec and not (isinstance(spec[key], int) and 0 < spec[key] < 2**31):
            raise ValueError(f"{key!r} of a {kind} module must be a positive integer, got {spec[key]!r}")


def build_layer(spec: dict) -> nn.Module:
    """The layer a description stands for; weights are uninitialised.

    Raises:
        ValueError: see :func:`check_description`.
    """
    check_description(spec, LAYERS)
    return LAYERS[spec["kind"]](spec)
