"""What a sparsity is a fraction of. How much a rank then takes is computed in :mod:`rankfold.compression.budget`."""

from dataclasses import dataclass
from typing import ClassVar

from .named import Named


@dataclass(frozen=True)
class Budget(Named):
    """Base of all budgets."""

    kind: ClassVar[str] = "budget"
    counts: ClassVar[str]  # what sizes count
    is_timed: ClassVar[bool] = False  # sizes are measured on the device, not computed from shapes


@dataclass(frozen=True)
class Parameters(Budget):
    """Weights."""

    name: ClassVar[str] = "parameters"
    counts: ClassVar[str] = "weights"


@dataclass(frozen=True)
class ContextBudget(Budget):
    """A budget that depends on the length of a sequence.

    Attributes:
        context: tokens of a sequence; clamped to the context of the model.
    """

    context: int = 2048

    def __post_init__(self):
        self.check("context", ">= 1; it is the tokens of one sequence", lambda value: value >= 1)


@dataclass(frozen=True)
class Bytes(ContextBudget):
    """Bytes of the checkpoint, codes and indices included.

    Attributes:
        batch: sequences of ``context`` tokens whose key/value cache is counted too; 0: the weights alone.
    """

    name: ClassVar[str] = "bytes"
    counts: ClassVar[str] = "bytes"

    batch: int = 0

    def __post_init__(self):
        super().__post_init__()
        self.check("batch", ">= 0; it is the sequences whose cache is counted", lambda value: value >= 0)


@dataclass(frozen=True)
class FLOPs(ContextBudget):
    """Multiply-accumulates per token."""

    name: ClassVar[str] = "flops"
    counts: ClassVar[str] = "multiply-accumulates per token"


@dataclass(frozen=True)
class Latency(ContextBudget):
    """Time of a forward of ``context`` tokens on this device."""

    name: ClassVar[str] = "latency"
    counts: ClassVar[str] = "nanoseconds"
    is_timed: ClassVar[bool] = True


BUDGETS: dict[str, type[Budget]] = {cls.name: cls for cls in (Parameters, Bytes, FLOPs, Latency)}
