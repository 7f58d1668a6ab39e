"""From importance scores to real-valued sparsities: MoDeGPT Sec. 3.3 and App. B.11.

Shape legend: L things (blocks, or halves of blocks) that get a sparsity each.
"""

import torch
from torch import Tensor

from ..errors import OptionError

__all__ = ["MAX_SPARSITY_RULE", "capped_sparsities", "epsilon_for", "softmax_sparsities"]

MAX_SPARSITY_RULE = 0.8  # App. B.2: choose epsilon so that the largest layer sparsity is around 80 %
COLDEST = (
    1e-3  # temperature over the spread of the scores; a colder one would make much of differences that mean nothing
)


def softmax_sparsities(scores: Tensor, weights: Tensor, average: float, epsilon: float) -> Tensor:
    r"""Sparsity ``phi`` of every layer, high where the score is low; MoDeGPT Eq. 11.

    Maximises :math:`\sum_i s_i (1 - \phi_i) + \varepsilon H(\phi)` under the average: :math:`\phi_i = c\, e^{-s_i /
    \varepsilon}`, with ``c`` so that the WEIGHTED mean of ``phi`` is ``average``. With equal weights ``c`` is the paper's
    :math:`L \phi_{avg} / \sum_j e^{-s_j/\varepsilon}`. Entries may exceed 1; see :func:`capped_sparsities`.

    Args:
        scores: ``(L,)`` importance, e.g. ``1 - cos(input, output)``.
        weights: ``(L,)`` parameters of each, any positive scale.
        average: wanted mean, in [0, 1).
        epsilon: temperature, ``> 0``; large is uniform.
    """
    shape = (-(scores - scores.min()) / epsilon).exp()
    return shape * (average * weights.sum() / (shape * weights).sum())


def epsilon_for(scores: Tensor, weights: Tensor, average: float, largest: float = MAX_SPARSITY_RULE) -> float:
    """The temperature at which the largest sparsity is ``largest``: the paper's rule, by bisection.

    Returns ``inf`` (uniform) where all scores are equal or the average is already at ``largest``. Where the lowest scores
    nearly tie, the largest sparsity stays below: not less than a thousandth of the spread of the scores is returned.
    """
    spread = (scores.max() - scores.min()).item()
    if spread == 0 or average >= largest or average == 0:
        return float("inf")
    low, high = spread * COLDEST, spread * 1e4
    for _ in range(200):
        middle = (low * high) ** 0.5
        top = softmax_sparsities(scores, weights, average, middle).max().item()
        low, high = (middle, high) if top > largest else (low, middle)
    return high


def capped_sparsities(phi: Tensor, weights: Tensor, average: float, caps: Tensor) -> Tensor:
    """Clip to ``caps`` and give what was cut to the others in proportion, so that the weighted mean stays ``average``.

    Raises:
        OptionError: even all caps together do not reach the average; the message says what can be reached.
    """
    total = average * weights.sum()
    most = (caps * weights).sum()
    if total > most * (1 + 1e-12):
        raise OptionError(
            f"an average sparsity of {average:.4f} cannot be reached with these modules and ranks; the most is "
            f"{(most / weights.sum()).item():.4f}. Lower the sparsity, or compress more modules, or lower the multiple"
        )
    phi, free = phi.clone(), torch.ones_like(phi, dtype=torch.bool)
    while True:
        over = free & (phi >= caps)
        if not over.any():
            return phi.clamp_min(0)
        phi[over] = caps[over]
        free &= ~over
        fixed, rest = (phi * weights)[~free].sum(), (phi * weights)[free].sum()
        if not free.any():
            return phi.clamp_min(0)
        phi[free] = phi[free] * ((total - fixed) / rest) if rest > 0 else (total - fixed) / weights[free].sum()
