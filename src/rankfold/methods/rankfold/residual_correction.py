"""What the stream lacks after a projection, and how much of it the projection can be fitted to.

Shape legend: F input width of the projection, D model width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...architectures import Dense
from ...calibration.moments import BlockMoments, CrossMoment, Moment
from ...linalg.residual_correction import Regression, correct


class Repair(NamedTuple):
    """Result of :func:`repair`."""

    dense: Dense  # the projection, corrected
    report: dict
    held_out: Regression  # of what is missing, on the held-out samples


def repair(
    dense: Dense, moments: BlockMoments, held_out: BlockMoments, names: tuple[str, str], *, centred: bool
) -> Repair:
    """An output projection moved towards what is missing after it, as far as held-out samples confirm.

    Args:
        moments, held_out: of windows to fit and of others.
        names: statistics of its input and of what is missing.
        centred: it has a bias, which takes the means, and the covariances are fitted. Where a bias stays as it is, the
            weight is fitted to what is missing beyond it.

    Returns:
        Weights in fp64.
    """
    received, missing = (moments[name] for name in names)
    about = None
    if dense.bias is not None:
        about = (received.mean, missing.mean) if centred else (torch.zeros_like(received.mean), dense.bias.double())
    fit, others = (regression(these[names[0]], these[names[1]], about) for these in (moments, held_out))
    correction = correct(dense.weight.double(), fit, others)
    bias = missing.mean - correction.W @ received.mean if centred else dense.bias
    report = {
        "residual_correction": correction.strength,
        "residual_correction_ridge": correction.ridge,
        "missing_before": correction.before,
        "missing_after": correction.after,
    }
    return Repair(Dense(correction.W, bias), report, others)


def regression(received: Moment, missing: CrossMoment, about: tuple[Tensor, Tensor] | None) -> Regression:
    """Return the moments of the input and of what is missing.

    They are sums, of which no copy is made, or about two points where a bias takes them.
    """
    if about is None:
        scale = received.count / missing.count
        return Regression(received.second.double(), missing.second.double() * scale, missing.energy * scale)
    cross, energy = missing.second.double() / missing.count, missing.energy / missing.count
    h, t = about
    mean = missing.mean
    cross = cross.addr(t, received.mean, alpha=-1).addr_(mean - t, h, alpha=-1)
    return Regression(received.about(h), cross, energy - 2 * (mean @ t) + t @ t)
