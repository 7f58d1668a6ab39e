"""Norms of queries and keys that lost dimensions."""

import torch
from torch import nn


class PredictedNorm(nn.Module):
    """``weight * x / sqrt(m)`` of heads that lost dimensions, with ``m = sum((root * x)^2) + floor^2``.

    ``m`` stands for the mean square that the norm divided by when it saw all dimensions, predicted from those that are
    left; roots, because what is squared cannot become negative. Where the norm was over all heads, so is the sum.
    """

    def __init__(self, heads: int, width: int, over: str):
        super().__init__()
        self.over = over
        self.weight, self.root = (nn.Parameter(torch.empty(heads, width)) for _ in range(2))
        self.floor = nn.Parameter(torch.empty(heads, 1))

    def forward(self, x):
        """(B, T, heads, R)"""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        m = (wide * self.root).square().sum(-1, keepdim=True) + self.floor.to(wide.dtype).square()
        if self.over == "all heads":
            m = m.sum(-2, keepdim=True)
        return (wide * torch.rsqrt(m) * self.weight).to(x.dtype)
