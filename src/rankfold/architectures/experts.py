"""One view of a block's experts: MLPs side by side, stacked in 3-D parameters.

Shape legend: E experts, n tokens, D model width, F hidden width of an expert, R kept width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from .linear import Dense
from .rebuilding import FROM_CONFIG
from .spec import ExpertsSpec, part_at


@dataclass(frozen=True)
class ExpertsView:
    """The experts of one block; all have one hidden width."""

    spec: ExpertsSpec
    # Called with tokens (n, D), the experts of each (n, k), and their weights in its output (n, k); of Llama 4 with the
    # tokens for each expert in turn, times these weights (E n, D).
    module: Any
    active: int  # k, experts that a token is sent to
    groups: int = 1  # of experts side by side, of which the router first chooses some
    active_groups: int = 1

    @property
    def count(self) -> int:
        return self.module.down_proj.shape[0]

    @property
    def hidden(self) -> int:
        return self.module.down_proj.shape[1 if self.spec.transposed else 2]

    @property
    def biased(self) -> bool:
        return hasattr(self.module, "down_proj_bias")

    @property
    def is_gated(self) -> bool:
        """Whether what goes up is multiplied by a gate, as in most families."""
        return getattr(self.module, "has_gate", True)

    @property
    def rising_name(self) -> str:
        """Name of the parameter with the projections into the hidden units."""
        return "gate_up_proj" if self.is_gated else "up_proj"

    @property
    def per_unit(self) -> int:
        """Weights of a hidden unit of one expert."""
        return (3 if self.is_gated else 2) * self.down(0).weight.shape[0]

    @property
    def biases_per_unit(self) -> int:
        return (2 if self.is_gated else 1) if self.biased else 0

    def rising(self, expert: int) -> Dense:
        """``(2 F, D)`` gate and up, rows as they are stored; ``(F, D)`` without a gate."""
        return self._one(self.rising_name, expert)

    def down(self, expert: int) -> Dense:
        """``(D, F)``."""
        return self._one("down_proj", expert)

    def _one(self, name: str, expert: int) -> Dense:
        weight = getattr(self.module, name).detach()[expert]
        bias = getattr(self.module, f"{name}_bias").detach()[expert] if self.biased else None
        return Dense(weight.T if self.spec.transposed else weight, bias)

    def rows_of(self, keep: Tensor) -> Tensor:
        """Rows of :meth:`rising` that belong to the hidden units ``keep``."""
        if not self.is_gated:
            return keep
        if self.spec.interleaved:
            return torch.stack([2 * keep, 2 * keep + 1], 1).flatten()
        return torch.cat([keep, keep + self.hidden])

    def parameters_at(self, width: int) -> int:
        """Of one expert with so many hidden units, biases included."""
        biases = self.down(0).weight.shape[0] if self.biased else 0
        return (self.per_unit + self.biases_per_unit) * width + biases

    @property
    def counts(self) -> tuple[int, ...]:
        """Return how many experts a block of this family may have up to now, ascending: as many in each group, of which
        the router sums the best two."""
        return tuple(range(2 * self.groups if self.groups > 1 else 1, self.count + 1, self.groups))

    def describe_fewer(self, count: int) -> dict:
        """Describe each module that holds experts or their router with so many of them (:mod:`.rebuilding`)."""
        active = min(self.active, count // self.groups * self.active_groups)
        return {"kind": FROM_CONFIG, "config": {self.spec.count: count, self.spec.active: active}}

    def describe(self, width: int) -> dict:
        """Description of the experts with so many hidden units."""
        sizes = {"experts": self.count, "in": self.down(0).weight.shape[0], "width": width}
        return {"kind": "experts", **sizes, "bias": self.biased, "transposed": self.spec.transposed}

    def stacked(self, experts: list[tuple[Dense, Dense]]) -> dict[str, Tensor]:
        """The module's tensors out of gate and up ``(2 R, D)``, or up alone, and down ``(D, R)`` of every expert."""
        found, names = {}, (self.rising_name, "down_proj")
        for name, parts in zip(names, zip(*experts, strict=True), strict=True):
            weight = torch.stack([part.weight for part in parts])
            found[name] = weight.mT.contiguous() if self.spec.transposed else weight
            if self.biased:
                found[f"{name}_bias"] = torch.stack([part.bias for part in parts if part.bias is not None])
        return found


def read_experts(spec: ExpertsSpec, block: nn.Module, config: Any) -> ExpertsView | None:
    """The experts of a block; ``None`` where it has none."""
    experts = part_at(block, spec.path)
    if experts is None:
        return None
    groups = [getattr(config, name) for name in spec.groups or ()]
    active = getattr(config, spec.active)
    if not isinstance(active, int):  # transformers' own default in DeepSeek V2; such a model does not run
        raise UnsupportedModelError(
            f"the config has {spec.active}={active}, to how many experts a token is sent; correct config.json"
        )
    return ExpertsView(spec, experts, active, *groups)
