"""Round a matrix to blocks of 32 numbers with one step each, for the inputs that it gets.

GPTQ (arXiv:2210.17323, Alg. 1), columns in the order of what enters them and steps chosen in advance, as its authors
added later (``act_order`` and ``static_groups``). The grids are those of llama.cpp's Q4_0, Q5_0 and Q8_0.

Shape legend: O output width, F input width, n = F / 32 blocks of a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .compensation import change_columns, inverse_factor
from .psd import all_finite, damped

BLOCK = 32  # numbers with a step of their own
# Of the second moment, relative to its mean diagonal. GPTQ has 0.01, with which SmolLM2 in Q4_0 diverged a little more;
# with 0.5 it diverged as much as with this.
RIDGE = 0.1
SHARES = torch.arange(-9, 10) / 10  # of a level by which the largest number of a block may miss its own


class RoundingOrder(NamedTuple):
    """Result of :func:`rounding_order`, for all matrices that get the same inputs."""

    columns: Tensor  # (F,) in the order in which they are rounded
    weight: Tensor  # (F,) fp32, what a squared error in a column counts
    factor: Tensor  # (F, F) fp32, upper triangular: U of the columns in that order


class Rounded(NamedTuple):
    """Result of :func:`round_to_blocks`: ``W = step * codes``, block by block."""

    codes: Tensor  # (O, F) int8, in [-levels, levels - 1]
    steps: Tensor  # (O, n) fp16; negative where the largest number of a block is positive

    def values(self) -> Tensor:
        """``(O, F)`` fp32 numbers, exactly as llama.cpp reads them."""
        return self.codes.float() * self.steps.float().repeat_interleave(BLOCK, 1)


@torch.no_grad()
def rounding_order(C: Tensor) -> RoundingOrder:
    r"""Order columns by the size of their inputs, and factor :math:`(C + \lambda I)^{-1} = U^\top U` in this order.

    Args:
        C: ``(F, F)`` second moment :math:`\mathbb{E}[x x^\top]` of the inputs, fp64. Where it is 0 all count alike.

    Raises:
        torch.linalg.LinAlgError: ``C`` is no second moment: not positive definite even with ``lambda``.

    Cost: O(F^3) time.
    """
    weight = damped(C, RIDGE, name="C").diagonal()
    order = weight.argsort(descending=True, stable=True)
    U = inverse_factor(C[order][:, order], RIDGE)
    if U is None:
        raise torch.linalg.LinAlgError(f"the second moment {tuple(C.shape)} is not positive definite; use more tokens")
    return RoundingOrder(order, weight.float(), U.float())


@torch.no_grad()
def round_to_blocks(W: Tensor, given: RoundingOrder, *, levels: int) -> Rounded:
    r"""Round ``W`` so that :math:`\mathbb{E}\|(W - W')x\|^2` stays small.

    Columns are rounded one after another, those with the largest inputs first. What rounding column ``j`` costs is made
    up for by the columns that are still free: :math:`w_k \leftarrow w_k - (w_j - w'_j) U_{jk} / U_{jj}`. The step of a
    block is the one of 38 candidates with the least error of ``W`` itself, weighted by the inputs; it is rounded to
    fp16 BEFORE codes are chosen.

    Args:
        W: ``(O, F)`` weight, finite; ``F`` a multiple of 32.
        given: of the inputs.
        levels: half the number of codes: 8 for Q4_0, 16 for Q5_0, 128 for Q8_0.

    Raises:
        ValueError: shapes disagree, ``F`` is not a multiple of 32, or ``W`` is not finite.

    Cost: O(F^2 O) time.
    """
    order = given.columns
    if W.shape[1] % BLOCK or W.shape[1] != len(order):
        raise ValueError(
            f"W must have a multiple of {BLOCK} columns, and as many as there are inputs, got {tuple(W.shape)} and "
            f"{len(order)} inputs"
        )
    if not all_finite(W):
        raise ValueError("W must be finite")
    steps = choose_steps(W.float(), given.weight, levels=levels)
    codes = torch.empty_like(W, dtype=torch.int8)
    rest = W.float()[:, order]  # a copy

    def rounded(j: int) -> Tensor:
        step = steps[:, order[j] // BLOCK].float()
        code = _codes(rest[:, j], step, levels)
        codes[:, order[j]] = code.to(torch.int8)
        return code * step

    change_columns(rest, given.factor, rounded)
    return Rounded(codes, steps)


def choose_steps(W: Tensor, weight: Tensor, *, levels: int) -> Tensor:
    """``(O, n)`` fp16 steps with the least error ``sum_j weight_j (W - step * code)_j^2`` in every block.

    Args:
        W: ``(O, F)`` fp32.
        weight: ``(F,)`` what a squared error of each column counts, >= 0.

    Candidates put the largest number of a block on the lowest code, or up to nine tenths of a level beside it; each is
    taken as it is, and refitted by least squares to the codes that it gives.
    """
    blocks, weight = W.unflatten(1, (-1, BLOCK)), weight.view(-1, BLOCK)
    largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))[..., 0]
    best = (largest / -levels).half()
    least = _error(blocks, weight, best, levels)
    for share in SHARES.tolist():
        plain = (largest / (share - levels)).half()
        code = _codes(blocks, plain[..., None].float(), levels)
        energy = (weight * code * code).sum(2)
        fitted = ((weight * blocks * code).sum(2) / energy).half()
        for step in (plain, torch.where(energy > 0, fitted, plain)):
            error = _error(blocks, weight, step, levels)
            best, least = torch.where(error < least, step, best), torch.minimum(error, least)
    return best


def _error(blocks: Tensor, weight: Tensor, step: Tensor, levels: int) -> Tensor:
    step = step.float()[..., None]
    return (weight * (blocks - _codes(blocks, step, levels) * step).square()).sum(2)


def _codes(x: Tensor, step: Tensor, levels: int) -> Tensor:
    """Codes nearest to ``x``, as floats; 0 where the step is."""
    return (x / torch.where(step == 0, torch.inf, step)).round().clamp(-levels, levels - 1)
