"""Weights with two zeros in every four: which ones, and what the others become.

Shape legend: O output width, N input width, a multiple of four. A group is four consecutive inputs of one output, as
sparse tensor cores want it.
"""

import torch
from torch import Tensor

from rankfold.linalg.compensation import change_columns, inverse_factor
from rankfold.linalg.psd import all_finite, check_moment

GROUP, KEPT = 4, 2


def activation_scores(W: Tensor, C: Tensor) -> Tensor:
    r"""``(O, N)`` of Wanda (arXiv:2306.11695, Eq. 1): :math:`|W_{ij}| \, \|x_j\|`, the norm up to the number of tokens.

    Args:
        W: ``(O, N)``.
        C: ``(N, N)`` second moment of the inputs; only its diagonal counts. Where it is 0 all inputs count alike.
    """
    check_moment(C, W.shape[1])
    energy = C.diagonal().clamp_min(0)
    return W.to(C).abs() * (energy if energy.any() else torch.ones_like(energy)).sqrt()


def gradient_scores(W: Tensor, gradient: Tensor) -> Tensor:
    r"""``(O, N)`` of Pruner-Zero (arXiv:2406.02924): :math:`|W \cdot W| \, \mathrm{mms}(G)`, ``mms`` scales a layer to
    [0, 1].

    Args:
        W: ``(O, N)``.
        gradient: ``(O, N)`` magnitude of the loss's gradient, ``>= 0``. Where it is the same everywhere all count
            alike.

    Raises:
        ValueError: shapes disagree.
    """
    if W.shape != gradient.shape:
        raise ValueError(f"the gradient must be {tuple(W.shape)} as the weight, got {tuple(gradient.shape)}")
    least, most = gradient.aminmax()
    scaled = (gradient - least) / (most - least) if most > least else torch.ones_like(gradient)
    return W.to(scaled).square() * scaled


def largest_of_four(scores: Tensor) -> Tensor:
    """``(O, N)`` true for the two largest scores of every group; of equal ones the first.

    Raises:
        ValueError: ``N`` is no multiple of four.
    """
    _check_width(scores)
    order = scores.unflatten(1, (-1, GROUP)).argsort(dim=-1, descending=True, stable=True)
    keep = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order[..., :KEPT], True)
    return keep.flatten(1)


@torch.no_grad()
def surgeon(W: Tensor, C: Tensor, *, ridge: float = 0.01) -> Tensor:
    r"""Set two of every four weights to zero and let the weights after them make up for it: SparseGPT
    (arXiv:2301.00774).

    Algorithm 1 with the 2:4 pattern. Columns go from left to right. With :math:`H = C + \lambda I` and the inverse
    :math:`P = (H_{j:,j:})^{-1}` over the columns not yet passed, a weight that goes at column :math:`j` changes those
    to its right by :math:`-w_j P_{0:} / P_{00}`: optimal brain surgery with the columns passed held still. At the first
    column of a group the two with the smallest :math:`w_j^2 / P_{00}` (each with its own :math:`P`) are chosen. The
    rows :math:`P_{0:} / \sqrt{P_{00}}` of all columns are those of the Cholesky factor :math:`U` of
    :math:`H^{-1} = U^\top U`.

    Args:
        W: ``(O, N)``.
        C: ``(N, N)`` second moment of the inputs; fp32 or fp64, any scale. Where it is 0 the smallest weights go.
        ridge: ``lambda`` relative to the mean diagonal of ``C``, ``> 0``.

    Returns:
        ``(O, N)`` in the dtype of ``C``, at most two non-zeros in every group.

    Raises:
        ValueError: shapes disagree, ``N`` is no multiple of four, or numbers are not finite.
        torch.linalg.LinAlgError: ``H`` is not positive definite.

    Cost: O(N^3 + O N^2) time, two ``(N, N)`` and two ``(O, N)`` matrices.
    """
    check_moment(C, W.shape[1])
    _check_width(W)
    if not all_finite(W):
        raise ValueError(f"W {tuple(W.shape)} has NaN or infinite entries")
    W, U = W.to(C, copy=True), inverse_factor(C, ridge)
    if U is None:
        raise torch.linalg.LinAlgError(
            f"the second moment {tuple(C.shape)} is not positive definite with ridge {ridge}; raise the ridge"
        )
    lengths, keep = U.diagonal(), torch.empty(0)

    def without(j: int) -> Tensor:
        nonlocal keep
        if j % GROUP == 0:
            here = slice(j, j + GROUP)
            keep = largest_of_four(W[:, here].square() / lengths[here].square())
        return W[:, j].masked_fill(~keep[:, j % GROUP], 0)  # a mask as an index would wait for the device

    change_columns(W, U, without)
    return W


def _check_width(W: Tensor) -> None:
    if W.ndim != 2 or W.shape[1] % GROUP:
        raise ValueError(
            f"2:4 sparsity needs an (out, in) matrix whose inputs are a multiple of four, got {tuple(W.shape)}"
        )
