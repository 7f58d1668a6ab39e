"""The mean square that a norm divides by, predicted from the dimensions that are left.

Shape legend: N dimensions the norm is over, R of them kept, ... any batch of heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDS = 200  # exchanges of constraints; a dozen is usual
TRIES = 3  # exchanges of all violated constraints that need not leave fewer of them


class MeanSquare(NamedTuple):
    """Result of :func:`fit_mean_square`."""

    squares: Tensor  # (..., R) factor of the square of each kept dimension, >= 1/N
    constant: Tensor  # (...) >= eps
    error: Tensor  # (...) mean square of the relative error, >= 0


def square_features(x: Tensor, eps: float) -> Tensor:
    """``(..., N + 1)`` squares of ``x`` ``(..., N)`` and a one, all over ``mean(x^2) + eps``."""
    squares = x.square()
    mean = squares.mean(-1, keepdim=True) + eps
    return torch.cat([squares, torch.ones_like(mean)], -1) / mean


@torch.no_grad()
def fit_mean_square(G: Tensor, keep: Tensor, *, eps: float, ridge: float = 1e-6) -> MeanSquare:
    r"""Predict ``m = mean(x^2) + eps`` from some of the dimensions, with no factor below the one it has there.

    Minimises :math:`\mathbb{E}[(1 - (\sum_{i \in S} a_i x_i^2 + c) / m)^2]` under :math:`a_i \ge 1/N`, :math:`c \ge
    \epsilon`: what the kept dimensions give is known, and of the others a non-negative combination is predicted. So the
    prediction is never below what the kept dimensions alone give, no normalised number can exceed :math:`\sqrt{N}` in
    size, and with all dimensions kept it is exact. The error is relative because a norm divides: every token counts
    alike.

    Args:
        G: ``(..., N + 1, N + 1)`` second moment of :func:`square_features`.
        keep: ``(..., R)`` kept dimensions.
        eps: of the norm.
        ridge: of the prediction of the others, relative to the moment's diagonal.

    Raises:
        ValueError: shapes disagree.

    Cost: O(R^3) a round, all heads together; a dozen rounds is usual.
    """
    N, R = G.shape[-1] - 1, keep.shape[-1]
    if G.shape[:-2] != keep.shape[:-1] or not 1 <= R <= N:
        raise ValueError(f"a moment {tuple(G.shape)} and kept dimensions {tuple(keep.shape)} do not belong together")
    own = _scattered(G.new_full((*keep.shape[:-1], R + 1), 1 / N), keep, N)
    own[..., -1] = eps
    target = _whole(G, eps) - own  # what the others give
    chosen = torch.cat([keep, keep.new_full((*keep.shape[:-1], 1), N)], -1)  # the constant too
    rows = G.gather(-2, chosen[..., None].expand(*chosen.shape, N + 1))
    inner = rows.gather(-1, chosen[..., None, :].expand(*chosen.shape, R + 1))
    found = nonnegative_fit(inner, (rows @ target[..., None])[..., 0], ridge=ridge)
    squares, constant = found[..., :-1] + 1 / N, found[..., -1] + eps
    return MeanSquare(squares, constant, mean_square_error(G, keep, squares, constant, eps=eps))


def mean_square_error(G: Tensor, keep: Tensor, squares: Tensor, constant: Tensor, *, eps: float) -> Tensor:
    """``(...)`` mean square of the relative error of a prediction on what has the second moment ``G``."""
    found = _scattered(torch.cat([squares, constant[..., None]], -1), keep, G.shape[-1] - 1)
    gap = _whole(G, eps) - found
    return torch.einsum("...i,...ij,...j->...", gap, G, gap).clamp_min(0)


def _whole(G: Tensor, eps: float) -> Tensor:
    """``(..., N + 1)`` factors of all features that give the mean square itself."""
    N = G.shape[-1] - 1
    whole = G.new_full((*G.shape[:-2], N + 1), 1 / N)
    whole[..., -1] = eps
    return whole


def _scattered(factors: Tensor, keep: Tensor, N: int) -> Tensor:
    """``(..., N + 1)`` of ``(..., R + 1)``, the constant last."""
    whole = factors.new_zeros(*factors.shape[:-1], N + 1).scatter(-1, keep, factors[..., :-1])
    whole[..., -1] = factors[..., -1]
    return whole


@torch.no_grad()
def nonnegative_fit(G: Tensor, c: Tensor, *, ridge: float) -> Tensor:
    r"""Minimise :math:`x^\top (G + \lambda D) x - 2 c^\top x` under ``x >= 0``, with ``D`` the diagonal of ``G``.

    Non-negative least squares from moments, by block principal pivoting (Kim and Park, SIAM J. Sci. Comput. 33, 2011):
    all variables and multipliers of the wrong sign change sides at once; where that no longer leaves fewer of them,
    only the last one does, which ends in a strictly convex problem.

    Args:
        G: ``(..., n, n)`` positive semi-definite.
        c: ``(..., n)``.
        ridge: relative to the diagonal, > 0.

    Returns:
        ``(..., n)``. Should rounding keep the exchanges from ending, what is negative after ``ROUNDS`` of them is set
        to 0.
    """
    scale = G.diagonal(dim1=-2, dim2=-1).clamp_min(torch.finfo(G.dtype).tiny).sqrt()
    identity = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    G = G / scale[..., :, None] / scale[..., None, :] + ridge * identity
    c = c / scale
    slack = 1e-12 * c.abs().amax(-1, keepdim=True)
    free = torch.ones_like(c, dtype=torch.bool)  # not held at 0
    fewest = torch.full_like(c[..., :1], c.shape[-1] + 1)
    tries = torch.full_like(fewest, TRIES)
    for _ in range(ROUNDS):
        both = free[..., :, None] & free[..., None, :]
        x = torch.linalg.solve(torch.where(both, G, identity), torch.where(free, c, 0.0))
        multipliers = (G @ x[..., None])[..., 0] - c
        wrong = torch.where(free, x, multipliers) < -slack
        count = wrong.sum(-1, keepdim=True).to(c)
        if not wrong.any():
            break
        better = count < fewest
        fewest = torch.where(better, count, fewest)
        tries = torch.where(better, TRIES, tries - 1)
        last = torch.zeros_like(wrong).scatter(-1, _last(wrong), True) & wrong
        free = free ^ torch.where(better | (tries >= 0), wrong, last)
    return x.clamp_min(0) / scale


def _last(wrong: Tensor) -> Tensor:
    """``(..., 1)`` index of the last true entry; 0 without any."""
    places = torch.arange(wrong.shape[-1], device=wrong.device)
    return (wrong * places).argmax(-1, keepdim=True)
