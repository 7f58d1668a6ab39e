"""Count the linear algebra of a compression, so that its time can be told before it is done.

Work maps a routine and the size of its matrices to how often it runs: ``{("eigh", 1024): 2.0}``. Each method declares
its own in ``work`` and ``work_of_curve``; leading terms are enough. The rates are measured
(:mod:`rankfold.compression.rates`).

Shape legend: D output width, F hidden width, R kept width.
"""

from collections import Counter

from ..linalg.psd import WIDE
from ..linalg.residual_correction import SKETCH

# What is compared only: in fp32 where moments are wide (:func:`rankfold.linalg.psd.choosing`).
COMPARED = ("compared cholesky", "compared inverse", "compared elimination")
ROUTINES = (
    "product",
    "cholesky",
    "inverse",
    "solve",
    "eigh",
    "svd",
    "elimination",
    *COMPARED,
    "bounds",
    "pass",
    "calls",
)
COUNTED = 1024  # width of the matrices that products and passes are counted in, and how many calls are counted as one

# How often the code does what it could do once. Change these with it.
CORRECTION_RIDGES = 4  # ridges that `linalg.residual_correction.correct` tries

Work = Counter  # of (routine, size)


def multiplying(*sizes: int) -> Work:
    """Count one product of an ``(a, b)`` and a ``(b, c)`` matrix in fp64."""
    a, b, c = sizes
    return Work({("product", COUNTED): a * b * c / COUNTED**3})


def passing(numbers: int, passes: int) -> Work:
    """Count operations on single numbers: so many passes over so many of them."""
    return Work({("pass", COUNTED): passes * numbers / COUNTED**2})


def calling(calls: int) -> Work:
    """Count operations on so few numbers that calling them is what takes time."""
    return Work({("calls", COUNTED): calls / COUNTED})


def inverting(F: int) -> Work:
    """Count one inverse of an ``(F, F)`` moment."""
    return Work({("inverse", F): 1.0})


def eliminating(F: int, D: int, R: int) -> Work:
    """Count the elimination of units down to ``R``; one of half of them with ``D = F`` counts as 1.

    A removal from ``n`` units takes ``n^2 + 2 D n`` operations: half of the symmetric inverse, and the weights.
    """

    def operations(D: int, R: int) -> int:
        """Sum ``n (n + 2 D)`` over n from R + 1 to F."""
        squares = F * (F + 1) * (2 * F + 1) // 6 - R * (R + 1) * (2 * R + 1) // 6
        return squares + D * (F - R) * (F + R + 1)

    return Work({("elimination", F): operations(D, R) / operations(F, F // 2)})


def comparing_ranks(F: int, D: int, R: int) -> Work:
    """Count the error of a down projection at every rank down to ``R``."""
    found = inverting(F) + eliminating(F, D, R)
    return Work({(f"compared {name}", size): count for (name, size), count in found.items()}) + multiplying(
        D, F, F // 4
    )


def refitting(F: int, D: int, R: int) -> Work:
    """Count the refit of a down projection on ``R`` units, its errors and bounds."""
    found = Work({("cholesky", R): 1.0, ("solve", R): D / R}) + passing(F * F, 10)
    for sizes in ((R, F - R, D), (D, F - R, (F - R) // 2), (D, F, F // 2)):
        found += multiplying(*sizes)
    bounds = multiplying(R, F // 2, F - R) + multiplying(D, D, F)
    return found + Work({("bounds", COUNTED): bounds["product", COUNTED]})


def correcting(F: int, D: int) -> Work:
    """Count the correction of an ``(D, F)`` projection by what the stream lacks after it."""

    def step(outputs: int) -> Work:
        return Work({("solve", F): outputs / F}) + multiplying(outputs, F, F // 2)

    one, narrow = Work({("cholesky", F): 1.0}), F < WIDE or D <= SKETCH
    if narrow:
        found = times(one + step(D), CORRECTION_RIDGES)
    else:
        found = times(Work({("compared cholesky", F): 1.0}) + step(SKETCH), CORRECTION_RIDGES) + one + step(D)
    return found + passing(F * F, 20) + times(multiplying(D, F, F), 3)  # residues and losses


def of_trial(work: Work) -> Work:
    """Return what of some work a trial of the measured allocation does after the curve of the module is known."""
    names = {"inverse": None, "elimination": None, "bounds": None, "cholesky": "compared cholesky"}
    return Work({(name, size): n for (old, size), n in work.items() if (name := names.get(old, old)) is not None})


def times(work: Work, count: float) -> Work:
    """Return the work done so many times."""
    return Work({key: count * value for key, value in work.items()})
