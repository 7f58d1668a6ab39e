"""The same sparsity for all modules."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import RanksBySparsity
from .prunable import PrunableModule


@dataclass(frozen=True)
class Uniform(RanksBySparsity):
    """Remove the same fraction of every module."""

    name: ClassVar[str] = "uniform"

    def sparsities(
        self, modules: list[PrunableModule], weights: Tensor, average: float, measured: None
    ) -> tuple[Tensor, dict[str, Any]]:
        return torch.full_like(weights, average), {}
