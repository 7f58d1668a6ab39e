"""Putting projections, attention and experts into a :class:`~rankfold.methods.BlockResult`."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..architectures import AttentionView, Dense, ExpertsView
from .base import BlockResult


@dataclass(frozen=True)
class Latent:
    """A factorised projection: its description and tensors, as a module of the runtime reads and stores them."""

    spec: dict
    tensors: dict[str, Tensor]


Projection = Dense | Latent


def describe(projection: Projection) -> dict:
    """Its description for the checkpoint's config."""
    if isinstance(projection, Latent):
        return projection.spec
    out_features, in_features = projection.weight.shape
    return {"kind": "linear", "in": in_features, "out": out_features, "bias": projection.bias is not None}


def tensors_of(projection: Projection) -> dict[str, Tensor]:
    """Its tensors by the names of the runtime module."""
    if isinstance(projection, Latent):
        return projection.tensors
    tensors = {"weight": projection.weight, "bias": projection.bias}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def put_projection(result: BlockResult, path: str, projection: Projection) -> None:
    """Replace the linear layer at ``path``."""
    result.modules[path] = describe(projection)
    result.state.update({f"{path}.{name}": tensor for name, tensor in tensors_of(projection).items()})


def put_attention(
    result: BlockResult,
    attention: AttentionView,
    projections: Mapping[str, Projection],
    qk_dim: int,
    vo_dim: int,
    pairs: Tensor | None = None,
    latent_cache: str = "",
    norms: dict[str, Tensor] | None = None,
) -> None:
    """Replace the attention module, and the output projection where that is not in it.

    Args:
        projections: q, k, v, o; or qkv, which share a latent, and o.
        qk_dim, vo_dim: widths per head.
        pairs: ``(K, qk_dim / 2)`` kept rotary pairs.
        latent_cache: which of ``k`` and ``v`` keep their latent in the cache instead of their heads.
        norms: tensors of q/k-norms that predict their mean square, by name; without, the dense ones stay.
    """
    path = attention.spec.path
    if attention.spec.outside:
        put_projection(result, attention.output_path, projections["o"])
        projections = {name: projection for name, projection in projections.items() if name != "o"}
    sizes = {
        "qk_dim": qk_dim,
        "vo_dim": vo_dim,
        "rotary_dim": attention.rotary_dim,
        "selected_pairs": pairs is not None,
    }
    result.modules[path] = {
        **attention.runtime(),
        **({"adopt": {}, "predicted_norms": True} if norms else {}),
        **sizes,
        "latent_cache": latent_cache,
        **{name: describe(projection) for name, projection in projections.items()},
    }
    for name, projection in projections.items():
        result.state.update({f"{path}.{name}_proj.{key}": t for key, t in tensors_of(projection).items()})
    result.state.update({f"{path}.{name}": tensor for name, tensor in (norms or {}).items()})
    if attention.sinks is not None:
        result.state[f"{path}.sinks"] = attention.sinks
    if pairs is not None:
        result.state[f"{path}.rotary_pairs"] = pairs.to(torch.int32)


def put_experts(result: BlockResult, experts: ExpertsView, kept: list[tuple[Tensor, Dense]]) -> None:
    """Replace the experts by narrower ones.

    Args:
        kept: of each expert the hidden units that stay, ``(R,)``, and its down projection on them, ``(D, R)``.
    """
    parts = [(experts.rising(n).rows(experts.rows_of(keep)), down) for n, (keep, down) in enumerate(kept)]
    path = experts.spec.path
    result.modules[path] = experts.describe(parts[0][1].weight.shape[1])
    result.state.update({f"{path}.{name}": tensor for name, tensor in experts.stacked(parts).items()})
