"""Accelerators by name or memory, and how long they take for the linear algebra that is counted."""

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from .._utils.files import read_json
from ..errors import OptionError, option
from ..methods.work import Work

FILE = Path(__file__).with_name("cards.json")
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*GB", re.IGNORECASE)
# Floating-point operations of a routine on (n, n) matrices, over n^3, by the rate that they go at.
OPERATIONS = {
    "product": ("fp64", 2.0),
    "cholesky": ("fp64", 1 / 3),
    "inverse": ("fp64", 2.33),  # the factor, and the identity solved for, as cuSOLVER does it
    "solve": ("fp64", 2.33),
    "elimination": ("fp64", 1.04),
    "compared cholesky": ("fp32", 1 / 3),
    "compared inverse": ("fp32", 2.33),
    "compared elimination": ("fp32", 1.04),
    "bounds": ("fp64", 2.0),
    "eigh": ("eigh", 9.0),
    "svd": ("eigh", 20.0),
}
PASS_BYTES = 16.0  # of a number that is read and written in fp64
# Seconds of a removal among a group, over the units there are: this part of an elimination runs on the CPU.
REMOVAL_SECONDS = 1.6e-9


@dataclass(frozen=True)
class Card:
    """An accelerator. Rates are those that rankfold's own calls reach, in operations and bytes a second.

    Attributes:
        gigabytes: of its memory, 1e9 bytes.
        tflops: by kind of product: ``bf16``, ``gram`` (bf16 into fp32), ``fp32``, ``fp64``; ``eigh`` of large matrices,
            fp64.
        memory, read: 1e9 bytes a second of its memory, and of reading a checkpoint.
        solver_ms, launch_us: least time of a small eigenvalue problem, and of an operation on a few numbers.
        is_measured: whether ``benchmarks/gpu.py rates`` gave these numbers; they are predicted otherwise.
    """

    name: str
    gigabytes: float
    tflops: dict[str, float]
    memory: float
    read: float
    solver_ms: float
    launch_us: float
    is_measured: bool = False

    @property
    def bytes(self) -> int:
        return int(self.gigabytes * 1e9)

    def seconds(self, kind: str, operations: float) -> float:
        """Return the seconds of so many floating-point operations at one of its rates."""
        return operations / (self.tflops[kind] * 1e12)

    def seconds_for(self, work: Work) -> float:
        """Estimate the seconds that some linear algebra takes."""
        return sum(count * self._one(routine, size) for (routine, size), count in work.items())

    def _one(self, routine: str, n: int) -> float:
        if routine == "pass":
            return PASS_BYTES * n * n / (self.memory * 1e9)
        if routine == "calls":
            return n * self.launch_us * 1e-6
        kind, operations = OPERATIONS[routine]
        found = self.seconds(kind, operations * float(n) ** 3)
        if routine.endswith("elimination"):
            return found + n / 2 * REMOVAL_SECONDS * n
        return max(found, self.solver_ms * 1e-3) if kind == "eigh" else found


@cache
def known_cards() -> dict[str, Card]:
    """Return the cards of the table by name."""
    return {name: Card(name, **facts) for name, facts in read_json(FILE)["cards"].items()}


def find_card(text: str) -> Card:
    """Return the card that is meant.

    Args:
        text: a name, such as ``h100``; or a size such as ``80GB``, which takes the rates of the card with the nearest
            memory.

    Raises:
        OptionError: neither.
    """
    cards = known_cards()
    if text.lower() in cards:
        return cards[text.lower()]
    size = SIZE.fullmatch(text.strip())
    if size is None or float(size[1]) <= 0:
        raise OptionError(f"{option('gpu')} takes a size such as 80GB, or one of {', '.join(cards)}; got {text!r}")
    gigabytes = float(size[1])
    nearest = min(cards.values(), key=lambda card: abs(card.gigabytes - gigabytes))
    return replace(nearest, gigabytes=gigabytes)
