"""A decoder block whose residual stream changes its width and its coordinates on the way (SliceGPT, arXiv:2401.15024).

Shape legend: D width of the dense model's stream, r of it kept; r may differ before, inside and after a block.
"""

import inspect

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .kernels import by_place


class ShortcutBlock(GradientCheckpointingLayer):
    """``y = S1 x + attention(N(x))``, ``z = S2 y + mlp(N(y))``.

    A parallel block has ``z = S x + attention(N(x)) + mlp(N(x))``. It stands in for the block of any family: the layers
    of attention and MLP keep their places in it, and only the sums and norms are its own. ``S`` take the stream from
    the coordinates before a half to those after it. ``N(x) = x / sqrt(|x|^2 / D + eps)`` divides by the width of
    the dense model, so that a direction that is gone counts as zero; scales, shifts and means of the family's norms are
    in the weights. In the first block ``enter`` takes the stream from the model's coordinates, in the last one
    ``leave`` takes it back.

    Dropout that a family has in its block (not in its attention) is not there.
    """

    def __init__(self, spec: dict, dense: nn.Module):
        super().__init__()
        self.paths = {name: spec[name] for name in ("attention", "up", "down", "activation")}
        self.paths["gate"] = spec.get("gate")
        for path in filter(None, self.paths.values()):
            dense.get_submodule(path)  # says what is missing
            child = path.partition(".")[0]
            self.add_module(child, getattr(dense, child))
        self.width, self.eps, self.fused_gate = spec["width"], spec["eps"], spec["fused_gate"]
        self.returns_tuple = spec["returns_tuple"]
        # Some models pass what a block is called with by place.
        self.names = getattr(dense, "names", None) or tuple(inspect.signature(type(dense).forward).parameters)[2:]
        before, inside, behind = spec["before"], spec.get("inside"), spec["behind"]
        self.middle = nn.Identity() if inside else None  # what enters here is the stream between attention and MLP
        self.enter = nn.Linear(self.width, before, bias=False) if spec["enters"] else None
        self.shortcut = nn.Linear(before, inside or behind, bias=False)
        self.mlp_shortcut = nn.Linear(inside, behind, bias=False) if inside else None
        self.leave = nn.Linear(behind, self.width, bias=False) if spec["leaves"] else None

    def forward(self, hidden_states, *args, **kwargs):
        kwargs |= by_place(self.names, args)
        given = {name: value for name, value in kwargs.items() if value is not None}
        x = hidden_states if self.enter is None else self.enter(hidden_states)
        attention = self.get_submodule(self.paths["attention"])
        added, weights = attention(self._norm(x, self.eps[0]), **given)
        if self.middle is None or self.mlp_shortcut is None:
            x = self.shortcut(x) + added + self._mlp(self._norm(x, self.eps[1]))
        else:
            x = self.middle(self.shortcut(x) + added)
            x = self.mlp_shortcut(x) + self._mlp(self._norm(x, self.eps[1]))
        x = x if self.leave is None else self.leave(x)
        return (x, weights) if self.returns_tuple else x

    def _norm(self, x, eps: float):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) / self.width + eps)).to(x.dtype)

    def _mlp(self, x):
        up, down, act = (self.get_submodule(self.paths[name]) for name in ("up", "down", "activation"))
        hidden = up(x)
        if self.fused_gate:
            gate, hidden = hidden.chunk(2, dim=-1)
            return down(act(gate) * hidden)
        if self.paths["gate"] is None:
            return down(act(hidden))
        return down(act(self.get_submodule(self.paths["gate"])(x)) * hidden)
