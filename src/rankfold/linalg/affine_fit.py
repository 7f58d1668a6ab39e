"""Low-rank regression with a bias, from sums over samples that never are in memory together.

Shape legend: u, t widths of inputs ``U`` and targets ``T``, r rank. Samples are columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rankfold.linalg.lowrank import low_rank
from rankfold.linalg.preconditioner import Preconditioner, preconditioner


class AffineFit(NamedTuple):
    """``T ~ B A U + bias``."""

    B: Tensor  # (t, r)
    A: Tensor  # (r, u)
    bias: Tensor  # (t,)

    def to(self, dtype: torch.dtype) -> "AffineFit":
        return AffineFit(self.B.to(dtype), self.A.to(dtype), self.bias.to(dtype))


class Sums:
    """First and second moments of inputs ``U`` and targets ``T``, summed around the mean of the first chunk.

    Args:
        centred: whether a fit to these has a bias, so that its moments are around the means.
    """

    def __init__(self, *, centred: bool):
        self.centred, self.count = centred, 0

    @property
    def width(self) -> int:
        """``u``"""
        return len(self.second)

    def add(self, U: Tensor, T: Tensor) -> None:
        if self.count == 0:
            self.about = U.mean(1), T.mean(1)
            self.total = [torch.zeros_like(mean) for mean in self.about]
            self.second, self.cross = U.new_zeros(len(U), len(U)), U.new_zeros(len(T), len(U))
            self.energy = [0.0, 0.0]
        U, T = U - self.about[0][:, None], T - self.about[1][:, None]
        self.count += U.shape[1]
        self.second.addmm_(U, U.T)
        self.cross.addmm_(T, U.T)
        for i, part in enumerate((U, T)):
            self.total[i] += part.sum(1)
            self.energy[i] += part.square().sum().item()

    def means(self) -> tuple[Tensor, Tensor]:
        (about_u, about_t), (total_u, total_t) = self.about, self.total
        return about_u + total_u / self.count, about_t + total_t / self.count

    def variances(self) -> tuple[float, float]:
        """Of ``U`` and of ``T``, summed over rows, per token; 0 where nothing but rounding varies."""

        def variance(mean: Tensor, total: Tensor, energy: float) -> float:
            value = (energy - total.square().sum().item() / self.count) / self.count
            rounding = (10 * torch.finfo(total.dtype).eps) ** 2 * mean.square().sum().item()
            return value if value > rounding else 0.0

        u, t = (variance(*of) for of in zip(self.means(), self.total, self.energy, strict=True))
        return u, t

    def moment(self) -> Tensor:
        """Second moment ``(u, u)`` of the inputs."""
        return self._around(self.second, 0)

    def cross_moment(self) -> Tensor:
        """``(t, u)``"""
        return self._around(self.cross, 1)

    def _around(self, total: Tensor, left: int) -> Tensor:
        """Move sums of products with inputs from the mean of the first chunk to that of all, or to zero."""
        found, means = total / self.count, self.means()
        found.addr_(self.total[left] / self.count, self.total[0] / self.count, alpha=-1)
        return found if self.centred else found.addr_(means[left], means[0])


def damped_root(moment: Tensor, damp: float) -> Preconditioner:
    """Root of ``moment + damp I``; the moment is changed in place."""
    moment.diagonal().add_(damp)
    return preconditioner(moment, "rootcov", ridge=0)


def fit_affine(sums: Sums, root: Preconditioner | None, W: Tensor, damp: float, rank: int) -> AffineFit:
    """Exact minimiser of ``||B A x + b - target||^2 / l + damp ||B A - W||^2`` at the given rank; of sums that are not
    centred ``b`` is zero."""
    root = root or damped_root(sums.moment(), damp)
    regression = root.solve(sums.cross_moment().add_(W, alpha=damp)) / root.scale**2
    B, A, _, _ = low_rank(regression, root, rank=rank)
    mean, target = sums.means()
    return AffineFit(B, A, target - B @ (A @ mean) if sums.centred else torch.zeros_like(target))


def run_affine(fit: AffineFit, X: Tensor) -> Tensor:
    """``B A X + bias``, samples as columns."""
    return fit.B @ (fit.A @ X) + fit.bias[:, None]
