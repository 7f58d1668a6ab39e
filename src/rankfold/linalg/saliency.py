"""What removing a unit should cost the loss, from gradients of its weights.

Shape legend: n units, ... any shape of the weights that belong to a unit.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add

from torch import Tensor


def damage(weights: Sequence[Tensor], fisher: Sequence[Tensor]) -> Tensor:
    r"""``(n,)`` change of the loss to second order, weights taken as independent: :math:`\frac12 \sum_i F_{ii} w_i^2`.

    Optimal Brain Damage (LeCun et al., 1989), the Fisher in place of the Hessian, summed over the weights of a unit.

    Args:
        weights: of the units, each ``(n, ...)``.
        fisher: its diagonal, in the same shapes; of any scale.
    """
    parts = ((F.double() * w.double().square()).flatten(1).sum(1) for w, F in zip(weights, fisher, strict=True))
    return reduce(add, parts) / 2


def taylor(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    r"""``(n,)`` change of the loss to first order, every weight by itself:
    :math:`\sum_i |w_i \, \partial L / \partial w_i|`.

    LLM-Pruner (arXiv:2305.11627, Sec. 3.2): element-wise importance without its second-order term, summed over all
    weights that belong to a unit.

    Args:
        weights: of the units, each ``(n, ...)``.
        gradients: of the loss of all text, in the same shapes; of any scale.
    """
    parts = ((g.double() * w.double()).abs().flatten(1).sum(1) for w, g in zip(weights, gradients, strict=True))
    return reduce(add, parts)
