"""The best output projection on top of reduced heads, all heads together.

Shape legend: H heads, N head dimension, R kept width, D model width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .psd import damping


class OutputRefit(NamedTuple):
    """Result of :func:`refit_across_heads`."""

    W: Tensor  # (D, H R)
    down: Tensor  # (H, R, N) what reduces each head

    def gap(self, W: Tensor) -> Tensor:
        """``W - W' E`` ``(D, H N)`` of the dense ``W``."""
        return W - torch.einsum("dhr,hrn->dhn", self.W.unflatten(1, self.down.shape[:2]), self.down).flatten(1)

    def error(self, W: Tensor, C: Tensor) -> float:
        """``E||W z - W' E z||^2`` of the dense ``W`` where ``E[z z^T] = C``."""
        gap = self.gap(W)
        return ((gap @ C) * gap).sum().clamp_min(0).item()


@torch.no_grad()
def refit_across_heads(W: Tensor, C: Tensor, down: Tensor, up: Tensor, *, ridge: float) -> OutputRefit:
    r"""Minimise :math:`\mathbb{E}\|W z - W' E z\|^2 + \lambda \|W' - W U\|^2` over the whole output projection.

    ``E`` is block-diagonal with the ``down`` of every head, ``U`` with its ``up``. Per head ``W U`` is all there is to
    gain; across heads what one head lost is partly told by the others: :math:`W' = W U + (W - W U E)\, C E^\top (E C
    E^\top + \lambda I)^{-1}`.

    Args:
        W: ``(D, H N)`` dense output projection.
        C: ``(H N, H N)`` second moment (or covariance) of its input.
        down, up: ``(H, R, N)`` and ``(H, N, R)``.
        ridge: ``lambda`` relative to the mean diagonal of ``E C E^T``.

    Raises:
        torch.linalg.LinAlgError: the damped moment of what the heads send is singular.
    """
    H, R, N = down.shape
    reduced = (down @ C.view(H, N, -1)).flatten(0, 1)  # (H R, H N) E C
    G = (reduced.view(-1, H, N).transpose(0, 1) @ down.mT).transpose(0, 1).flatten(1)  # (H R, H R) E C E^T
    prior = torch.einsum("dhn,hnr->dhr", W.unflatten(1, (H, N)), up).flatten(1)
    residue = W @ reduced.T - prior @ G
    G = (G + G.T) / 2
    G.diagonal().add_(damping(G, ridge))
    factor, info = torch.linalg.cholesky_ex(G)
    if info.item():
        if not C.diagonal().any():  # nothing is ever sent
            return OutputRefit(prior, down)
        raise torch.linalg.LinAlgError(
            f"the moment of what {H} heads of width {R} send is not positive definite; "
            "raise the ridge or use more tokens"
        )
    return OutputRefit(prior + torch.cholesky_solve(residue.T, factor).T, down)
