"""The same sparsity for all modules."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import RanksBySparsity

__all__ = ["Uniform"]


@dataclass(frozen=True)
class Uniform(RanksBySparsity):
    """Remove the same fraction of every module."""

    name: ClassVar[str] = "uniform"

    def sparsities(self, modules, weights, average: float, measured):
        return torch.full_like(weights, average), {}
