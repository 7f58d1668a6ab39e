"""Measure how long this device takes for the routines that :mod:`rankfold.methods.work` counts.

Each routine runs once, as the methods call it, on matrices of about the size it is counted for, or of :data:`LARGEST`;
the time of other sizes goes by the cube. Ranks differ from block to block, so sizes of up to an eighth less share one
measurement.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .._utils.hardware import seconds_of
from ..linalg.elimination import elimination
from ..linalg.psd import choosing, spd_factor, spd_inverse
from ..methods.work import ROUTINES, Work

LARGEST = 1536  # rows of what is measured: above it rates hardly change, and all routines together take a second or two
LEAST_SECONDS = 0.002  # that a measurement takes; short routines run several times


def _eliminate(C: Tensor) -> object:
    return elimination(C.clone(), C.clone(), rank=max(1, len(C) // 2))


_RUN: dict[str, Callable[[Tensor], object]] = {
    "product": lambda C: C @ C,
    "cholesky": torch.linalg.cholesky_ex,
    "inverse": spd_inverse,
    "compared cholesky": lambda C: spd_factor(C, dtype=choosing(C)),
    "compared inverse": lambda C: spd_inverse(C, dtype=choosing(C)),
    "compared elimination": lambda C: _eliminate(C.to(choosing(C))),
    "solve": lambda C: torch.cholesky_solve(C, torch.linalg.cholesky_ex(C).L),
    "eigh": torch.linalg.eigh,
    "svd": torch.linalg.svd,
    "pass": lambda C: C.abs(),
    "calls": lambda C: [C[0, 0].add(1.0) for _ in range(len(C))],
    "elimination": lambda C: _eliminate(C),
    "bounds": lambda C: C @ C,
}
assert _RUN.keys() == set(ROUTINES)


def seconds_for(work: Work, device: torch.device) -> float:
    """Estimate the seconds that some work takes on this device.

    Cost: what :func:`_seconds_of` measures is kept, so a second call costs nothing.
    """
    if device.type == "mps":  # decompositions run on the CPU there
        device = torch.device("cpu")
    return sum(
        count * _seconds_of(routine, size, device, torch.get_num_threads()) for (routine, size), count in work.items()
    )


def _seconds_of(routine: str, size: int, device: torch.device, threads: int) -> float:
    step = 1 << max(0, size.bit_length() - 4)
    measured = min(-(-size // step) * step, LARGEST)
    return _measured(routine, measured, device, threads) * (size / measured) ** 3


@functools.cache
def _measured(routine: str, size: int, device: torch.device, threads: int) -> float:
    """Return the seconds of one run; the least of two, the first of which also loads what the routine needs."""
    C = torch.full((size, size), 0.5 / size, dtype=torch.float64, device=device)
    C += torch.diag(torch.linspace(1, 2, size, dtype=torch.float64, device=device))  # positive definite, not diagonal
    run = _RUN[routine]
    timed = functools.partial(seconds_of, lambda: run(C), device)
    first = timed()
    again = [timed() for _ in range(1 + int(LEAST_SECONDS / max(first, 1e-5)))] if first < 0.1 else []
    return min([first, *again])
