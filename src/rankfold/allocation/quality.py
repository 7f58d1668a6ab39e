"""The sparsity that loses so much and no more: by a predicted curve, corrected by what runs have lost."""

import math
from collections.abc import Callable
from typing import NamedTuple

AIM, NEAR = 0.9, 0.75  # of the loss allowed: what is aimed at, and from where on a result is near enough
LEAST = 0.005  # sparsity that is worth a run
STEP = 1e-4  # between sparsities that are tried
RUNS = 4  # at most
FORWARD = 0.25  # of the way from a run that kept it to one that did not, at least: losses are flat first and steep then
# Of what is predicted at least, after one run: a refit may lose nothing at all at a small sparsity. After n runs its
# power of n, so that a model that loses little is not left far from what may be lost.
CORRECTED = 0.05
ROUNDING = 1e-9  # nats: what is predicted to lose less loses nothing

Curve = Callable[[float], float]  # sparsity -> expected loss; infinite where it cannot be reached


class Lost(NamedTuple):
    """What a run has lost."""

    sparsity: float
    loss: float  # nats per token

    def is_within(self, allowed: float) -> bool:
        """Tell whether it is no more than what may be lost."""
        return self.loss <= allowed


def guessed_loss(sparsity: float) -> float:
    r"""Return a loss in nats per token where none was measured: :math:`3 \ln^2(1 - s)`.

    The square because the loss has its minimum near the dense model; the factor is about that of small decoders.
    """
    return 3 * math.log1p(-sparsity) ** 2


def next_sparsity(curve: Curve, runs: list[Lost], allowed: float) -> float | None:
    """Return the sparsity to try next; ``None`` where a run is near enough, or no better one is to be expected.

    The curve is multiplied by what the runs have lost over what it predicted, interpolated between two of them, and
    solved for a little less than what is allowed, between the largest sparsity that kept it and the smallest that did
    not, a part of the way from the one to the other at least.

    Args:
        curve: increasing.
        runs: so far.
        allowed: loss in nats per token, > 0.
    """
    low = max((run.sparsity for run in runs if run.is_within(allowed)), default=0.0)
    high = min((run.sparsity for run in runs if not run.is_within(allowed)), default=1.0)
    is_near = any(NEAR * allowed <= run.loss <= allowed for run in runs)
    if is_near or len(runs) == RUNS or high - low <= 2 * STEP or high <= LEAST:
        return None
    found = max(_solve(lambda s: expected_loss(curve, runs, s), AIM * allowed, low, high), LEAST)
    if low > 0 and high < 1:
        found = max(found, round(low + FORWARD * (high - low), 4))
    return found if low < found < high else None


def expected_loss(curve: Curve, runs: list[Lost], sparsity: float) -> float:
    """Return the loss to expect after some runs: the curve, corrected by what these have lost."""
    return curve(sparsity) * _correction(curve, runs, sparsity)


def _solve(curve: Curve, value: float, low: float, high: float) -> float:
    """Return the largest multiple of STEP between two sparsities where an increasing curve is at most a value."""
    low, high = round(low / STEP), round(high / STEP)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if curve(round(middle * STEP, 4)) <= value else (low, middle)
    return round(low * STEP, 4)


def _correction(curve: Curve, runs: list[Lost], sparsity: float) -> float:
    """Return actual over predicted losses at a sparsity: beyond runs as at the nearest, between them geometrically, as
    losses that are flat first and steep then."""
    least = CORRECTED ** len(runs)
    known = sorted((run.sparsity, max(run.loss / max(curve(run.sparsity), ROUNDING), least)) for run in runs)
    if not known:
        return 1.0
    (a, at_a), (b, at_b) = (
        max((k for k in known if k[0] <= sparsity), default=known[0]),
        min((k for k in known if k[0] >= sparsity), default=known[-1]),
    )
    return at_a if a == b else at_a * (at_b / at_a) ** ((sparsity - a) / (b - a))
