"""How far the products of many pairs of heads are from those of other pairs, from small moments.

Shape legend: H heads on the left, K on the right (K divides H), h head dim, d_l, d_r widths.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rankfold.linalg.pair_tucker import across


class Pair(NamedTuple):
    """Heads on two sides, and what they make of the mean input where the metric is a covariance (biases included)."""

    left: Tensor  # (H, h, d_l)
    right: Tensor  # (K, h, d_r)
    left_mean: Tensor | None = None  # (H, h)
    right_mean: Tensor | None = None  # (K, h)


@torch.no_grad()
def pair_error(
    dense: Pair, other: Pair, *, metrics: tuple[Tensor | None, Tensor], rotations: Tensor | None = None
) -> float:
    r"""Relative error of all products :math:`G_i = L_i^\top \Theta R_g`, in the metric of inputs on either side.

    :math:`\sum \operatorname{tr}(C_l D C_r D^\top)` for ``D`` the change of ``G_i``, over the same for ``G_i``, root.
    From ``h x h`` moments: with ``D = (L - L')^T R + L'^T (R - R')`` every small term is a product of small factors.

    Args:
        dense, other: what is measured against what.
        metrics: ``C_l (d_l, d_l)``, or None for the identity, and ``C_r (d_r, d_r)``: for scores twice the second
            moment of the tokens (twice the covariance where means are given), for value-output None and that of the
            tokens.
        rotations: as in :func:`rankfold.linalg.joint_qk.joint_qk`.

    Cost: products of O((H + K) h d^2).
    """
    first, last = _Mixed(dense.left, other.left, metrics[0]), _Mixed(dense.right, other.right, metrics[1])
    first.add(dense.left_mean, other.left_mean)
    last.add(dense.right_mean, other.right_mean)

    def product(S_l: Tensor, S_r: Tensor) -> Tensor:
        return (S_l * across(S_r, rotations, dense.left, left=True)).sum()

    error = product(first.gap, last.dense) + product(first.kept, last.gap) + 2 * product(first.both, last.crossed)
    total = product(first.dense, last.dense)
    return (error / total.clamp_min(torch.finfo(total.dtype).tiny)).clamp_min(0).sqrt().item()


class _Mixed:
    """Moments (heads, h, h) of dense heads ``M``, of other ones ``N``, and of the gap ``M - N``."""

    def __init__(self, M: Tensor, N: Tensor, C: Tensor | None):
        gap = M - N
        weighted = gap if C is None else gap @ C
        self.gap, self.both = weighted @ gap.mT, weighted @ N.mT  # gap C gap^T, gap C N^T
        self.kept = (N if C is None else N @ C) @ N.mT
        self.crossed = self.gap + self.both.mT  # M C gap^T
        self.dense = self.crossed + self.both + self.kept

    def add(self, M: Tensor | None, N: Tensor | None) -> None:
        """The means, one more input direction of weight 1."""
        if M is not None and N is not None:
            mean = _Mixed(M[..., None], N[..., None], None)
            for name in ("gap", "kept", "both", "crossed", "dense"):
                setattr(self, name, getattr(self, name) + getattr(mean, name))
