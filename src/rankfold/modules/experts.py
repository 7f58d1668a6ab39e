"""Experts with fewer hidden units than the model's config says, and experts through latents.

Shape legend: E experts, n tokens, k experts of a token, D model width, R kept width.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from .layers import build_layer

WIDTHS = ("intermediate_dim", "intermediate_size")  # what families call the attribute that repeats the hidden width


def has_gate(family: nn.Module) -> bool:
    """Tell whether experts multiply what goes up by a gate, as most do."""
    return getattr(family, "has_gate", True)


def activation_of(family: nn.Module) -> Any:
    """What the family makes of what goes up: GPT-OSS clamps, and adds one to what its gate multiplies."""
    own: Any = family.act_fn if not has_gate(family) else getattr(family, "_apply_gate", None)
    return own or partial(_gated, family)


def _gated(family: Any, rising: torch.Tensor) -> torch.Tensor:
    gate, up = rising.chunk(2, dim=-1)
    return family.act_fn(gate) * up


def sent_rows(hidden_states: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows (m,) are sent to an expert, and to which (m, 1), of Llama 4.

    Its experts take all tokens once for each of them, (E n, D), times the router's weight: 0 where it sends nothing.
    """
    rows = hidden_states.any(-1).nonzero()
    return rows[:, 0], rows // (len(hidden_states) // experts)


def narrow_experts(spec: dict, dense: nn.Module) -> nn.Module:
    """The family's own module, and with it all kernels that transformers has for it, over narrower parameters.

    Args:
        spec: ``experts``, ``in``, ``width``, ``bias``, and whether weights are ``transposed``: (E, in, out).
        dense: the experts it replaces; its tensors are not looked at.
    """
    module = _without_weights(dense, spec)
    E, D, R = spec["experts"], spec["in"], spec["width"]
    rising = ("gate_up_proj", 2 * R, D) if has_gate(dense) else ("up_proj", R, D)
    for name, rows, columns in (rising, ("down_proj", D, R)):
        shape = (E, columns, rows) if spec["transposed"] else (E, rows, columns)
        setattr(module, name, nn.Parameter(torch.empty(shape)))
        if spec["bias"]:
            setattr(module, f"{name}_bias", nn.Parameter(torch.empty(E, rows)))
    for name in WIDTHS:
        if hasattr(module, name):
            setattr(module, name, R)
    return module


class LatentExperts(nn.Module):
    """Experts with layers of their own, of which some or all go through a latent, in place of stacked parameters.

    Args:
        spec: ``experts``, and the description of the layers into (``rising``: gate and up, rows as the family stores
            them) and out of (``falling``) the hidden units of each.
        dense: the experts it replaces; what they make of gate and up is the family's own.
    """

    family: Any

    def __init__(self, spec: dict, dense: nn.Module):
        super().__init__()
        self.__dict__["family"] = _without_weights(dense, spec)  # not a submodule: it has nothing to load
        self.rising, self.falling = (
            nn.ModuleList(build_layer(spec[side]) for _ in range(spec["experts"])) for side in ("rising", "falling")
        )

    def forward(self, hidden_states, top_k_index=None, top_k_weights=None):
        """(n, D) tokens, (n, k) their experts, (n, k) weights of these in the sum (n, D)."""
        sent = torch.zeros_like(hidden_states)
        if top_k_index is None or top_k_weights is None:
            rows, experts = sent_rows(hidden_states, len(self.rising))
            return sent.index_copy(0, rows, self(hidden_states[rows], experts, torch.ones_like(experts)))
        activate = activation_of(self.family)
        for expert, (rising, falling) in enumerate(zip(self.rising, self.falling, strict=True)):
            tokens, place = (top_k_index == expert).nonzero(as_tuple=True)
            hidden = activate(rising(hidden_states[tokens]))
            weighted = falling(hidden) * top_k_weights[tokens, place, None]
            sent.index_add_(0, tokens, weighted.to(sent.dtype))
        return sent


def _without_weights(dense: nn.Module, spec: dict) -> nn.Module:
    """A copy that has no parameters, with the same config."""
    family = getattr(dense, "family", dense)
    if family.num_experts != spec["experts"]:
        raise ValueError(f"'experts' of a {spec['kind']} module must be {family.num_experts}, got {spec['experts']}")
    config = getattr(family, "config", None)
    shared = {id(config): config} | {id(parameter): None for parameter in family.parameters()}
    return copy.deepcopy(family, shared)
