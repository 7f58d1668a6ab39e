"""Small layers with the input statistics that real ones show. Tokens are rows of ``X``.

gaussian: correlated features with a mean. low_rank: features fill 5 dims. outlier: one feature is 1000 times larger
(massive activations). ill_conditioned: standard deviations from 1 down to 1e-4. wide, tall: more inputs than outputs,
and the reverse.
"""

from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("gaussian", "low_rank", "outlier", "ill_conditioned", "wide", "tall")
SHAPES = {"wide": (6, 20), "tall": (20, 6)}  # (out, in)


class Problem(NamedTuple):
    X: Tensor  # (tokens, in)
    W: Tensor  # (out, in)
    C: Tensor  # (in, in) second moment
    mean: Tensor  # (in,)
    bias: Tensor  # (out,)

    @property
    def Sigma(self) -> Tensor:
        return self.C - torch.outer(self.mean, self.mean)

    @property
    def mean_abs(self) -> Tensor:
        return self.X.abs().mean(0)


def activations(kind: str, width: int, *, tokens: int = 300, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(tokens, width, generator=g, dtype=torch.float64)
    X = X + 0.6 * X.roll(1, 1) + torch.randn(width, generator=g, dtype=torch.float64)
    if kind == "low_rank":
        X = X[:, :5] @ torch.randn(5, width, generator=g, dtype=torch.float64)
    if kind == "outlier":
        X[:, 3] *= 1e3
    if kind == "ill_conditioned":
        turn = torch.linalg.qr(torch.randn(width, width, generator=g, dtype=torch.float64)).Q
        X = X * torch.logspace(0, -4, width, dtype=torch.float64) @ turn
    return X


def problem(kind: str, *, seed: int = 0) -> Problem:
    out, width = SHAPES.get(kind, (9, 12))
    X = activations(kind, width, seed=seed)
    g = torch.Generator().manual_seed(seed + 1000)
    W = torch.randn(out, width, generator=g, dtype=torch.float64)
    return Problem(X, W, X.T @ X / len(X), X.mean(0), torch.randn(out, generator=g, dtype=torch.float64))


def heads(count: int, h: int, d: int, *, seed: int = 0) -> Tensor:
    """(count, h, d) projection heads."""
    g = torch.Generator().manual_seed(seed + 2000)
    return torch.randn(count, h, d, generator=g, dtype=torch.float64)


def rms_error(Y: Tensor, Y_hat: Tensor) -> float:
    return ((Y - Y_hat).norm() / Y.norm()).item()
