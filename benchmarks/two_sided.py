"""Sparse matrices with a metric on both sides, for studies on random matrices.

Shape legend: G groups of rows (heads, or 1), O rows of a group, N columns.

Minimise ``energy - 2 <K, X> + <M X C, X>`` over ``X`` (G, O, N) with few non-zeros. rankfold's own solver
(:mod:`rankfold.linalg.sparse`) has no metric on the left: the sparse part of a layer needs none.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rankfold.linalg.sparse import hard_shrink, soft_shrink

STEPS = 50


class TwoSided:
    """The quadratic loss in coordinates where both metrics have unit diagonals.

    Args:
        M: ``(G, O, O)`` metric of the rows of each group.
        C: ``(N, N)`` metric of the columns.
        K: ``(G, O, N)`` minus half the gradient at zero.
        energy: the loss at zero.
    """

    def __init__(self, M: Tensor, C: Tensor, K: Tensor, energy: Tensor):
        rows, columns = (S.diagonal(dim1=-2, dim2=-1).clamp_min(1e-30).sqrt() for S in (M, C))
        self.size = rows[:, :, None] * columns
        self.M, self.C = M / (rows[:, :, None] * rows[:, None]), C / torch.outer(columns, columns)
        self.K, self.energy = K / self.size, energy
        largest = torch.linalg.eigvalsh(self.M)[:, -1] * torch.linalg.eigvalsh(self.C)[-1]
        self.step = 1 / largest.max()

    def descent(self, X: Tensor) -> Tensor:
        """Return minus half the gradient, in scaled coordinates."""
        return self.K - self.M @ X @ self.C

    def loss(self, X: Tensor) -> Tensor:
        """Return the loss over the energy, for ``X`` in scaled coordinates."""
        return (self.energy - ((self.K + self.descent(X)) * X).sum()) / self.energy

    def hard(self, start: Tensor, count: int, steps: int = STEPS) -> Tensor:
        """Return ``count`` non-zeros by gradient steps and hard shrinkage, their values refitted."""
        best = X = hard_shrink(start * self.size, count)
        for _ in range(steps):
            X = hard_shrink(X + self.step * self.descent(X), count)
            best = X if self.loss(X) < self.loss(best) else best
        return self.refit(best) / self.size

    def fista(self, steps: int = STEPS, penalties: int = 12) -> Iterator[Tensor]:
        """Yield solutions for falling penalties, refitted: FISTA (LatentLLM Eq. 233-236), step and momentum apart.

        Eq. 233-235 use one ``mu`` for both, which diverges as soon as it exceeds one over the largest eigenvalue.
        """
        X = torch.zeros_like(self.K)
        top = (2 * self.K).abs().max()
        for penalty in top * torch.logspace(-0.3, -3.3, penalties, dtype=top.dtype):
            ahead, momentum = X, 1.0
            for _ in range(steps):
                moved = soft_shrink(ahead + self.step * self.descent(ahead), self.step * penalty / 2)
                following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
                ahead, X, momentum = moved + (momentum - 1) / following * (moved - X), moved, following
            yield self.refit(X) / self.size

    def refit(self, X: Tensor, steps: int = STEPS) -> Tensor:
        """Return the best values on the support of ``X`` by conjugate gradients."""
        mask = X != 0
        residual = direction = self.descent(X) * mask
        size = residual.square().sum()
        stop = size * torch.finfo(X.dtype).eps ** 2
        for _ in range(steps):
            moved = self.M @ direction @ self.C * mask
            curvature = (direction * moved).sum()
            if size <= stop or curvature <= 0:
                break
            X, residual = X + size / curvature * direction, residual - size / curvature * moved
            size, before = residual.square().sum(), size
            direction = residual + size / before * direction
        return X
