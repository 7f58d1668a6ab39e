"""What every compression method is to the pipeline.

A method says which ranks a block may take and what they cost (:meth:`Method.prunable_modules`), which statistics it
needs (:meth:`Method.statistics`), and turns a block, its moments and its ranks into smaller modules
(:meth:`Method.decompose`). Allocation, calibration, checkpoints and reports know nothing else about it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from .._utils.processes import dealt
from ..allocation import Allocation, Budget, Latency, Measured, PrunableModule
from ..architectures import Architecture, BlockView
from ..calibration.moments import BlockMoments
from ..errors import OptionError
from .config import MethodConfig
from .work import Work


@dataclass
class BlockResult:
    """A compressed block, or what one stage made of it."""

    # Path relative to the block -> description (see modules/building.py).
    modules: dict[str, dict] = field(default_factory=dict)
    # Tensor name relative to the block -> value: all of the modules above, and what changes in those of earlier stages.
    state: dict[str, Tensor] = field(default_factory=dict)
    reports: dict[str, dict] = field(default_factory=dict)  # module -> what was measured: relative_error, bounds, ...
    # Module -> relative error of its fit on any moments of the same statistics, such as those of held-out samples.
    errors: dict[str, Callable[[BlockMoments], float]] = field(default_factory=dict)
    # (D, r) orthonormal: the block writes the stream in these coordinates, and the next one, whose ``view.basis`` it
    # is, reads it in them. Kept with the run, not in the model. ``None``: in the model's own coordinates.
    basis: Tensor | None = None


class Curve(NamedTuple):
    """What a module would lose at every rank."""

    errors: dict[int, float]  # rank -> squared relative error; 0 where the module stays dense
    # To be put beside the moments of the block, so that decomposing it does not find the same again.
    found: Mapping[str, Any] = MappingProxyType({})


class CompressionStep(NamedTuple):
    """One step of compressing a block, measured on what the steps before it left."""

    statistics: set[str]  # what it reads
    # (the block as it is now, its moments, what measures the same on samples that nothing is fitted to, None without
    # any) -> what is replaced
    decompose: Callable[[BlockView, BlockMoments, Callable[[], BlockMoments | None]], BlockResult]
    # The same step in pieces, which are dealt to several processes: no two read the same statistic.
    pieces: tuple["CompressionStep", ...] = ()
    # Of a piece: its modules, where all processes run it, on the same moments, and share what it computes
    # (:func:`rankfold._utils.processes.dealt`). The rest of it only copies tensors, so that all come to the same bytes.
    # Only such a piece may read held-out samples.
    shared: tuple[str, ...] = ()
    # Whether it is the first one that finds queries, keys and values as they will be: from here on what attention mixes
    # of the samples is the same, and is computed once.
    attention_stays: bool = False


def spared_passes(steps: Sequence[CompressionStep]) -> int:
    """Return in how many passes through a block attention does not run: after the first step for which it stays, and
    when the compressed block is followed."""
    return next((len(steps) - i for i, step in enumerate(steps) if step.attention_stays), 0)


@dataclass(frozen=True)
class Method(MethodConfig):
    """What the pipeline calls.

    A method defines six that raise here; the others have defaults, or are for one allocation.

    :meth:`supported_modules`, :meth:`statistics` and :meth:`prunable_modules` say what there is to choose from,
    :meth:`parameter_change` and :meth:`cached_numbers` what a choice leaves, and :meth:`decompose` makes it.
    """

    def supported_modules(self, architecture: Architecture, view: BlockView) -> tuple[str, ...]:
        """Modules of this architecture that the method can take.

        Raises:
            UnsupportedModelError: a module was asked for by name that it cannot.
        """
        raise NotImplementedError

    def statistics(self, view: BlockView) -> set[str]:
        """Names of the statistics that its stages read."""
        raise NotImplementedError

    def gradients(self, view: BlockView) -> set[str]:
        """Names out of :data:`rankfold.calibration.gradients.GRADIENTS` that it reads too; none by default."""
        return set()

    def shared(self, view: BlockView) -> set[str]:
        """Statistics of all blocks of the dense model that :meth:`sum_up` reads; none by default."""
        return set()

    def sum_up(self, blocks: Iterable[BlockMoments]) -> BlockMoments:
        """What every block is given beside its own moments, of the :meth:`shared` statistics of all blocks."""
        return {}

    def group(self, index: int, blocks: int) -> range:
        """Blocks of the dense model that :meth:`pool` reads for a block; none by default."""
        return range(0)

    def pool(self, members: Iterable[tuple[BlockView, BlockMoments]]) -> BlockMoments:
        """What a block is given beside its own moments, of the :meth:`shared` statistics of its :meth:`group`."""
        return {}

    def stages(self, view: BlockView, ranks: dict[str, int]) -> list[CompressionStep]:
        """The steps in which a block is compressed to the given ranks (module -> rank); one by default."""
        return [self._step(self.statistics(view), ranks)]

    def _step(self, statistics: set[str], ranks: dict[str, int], *, is_shared: bool = False) -> CompressionStep:
        """Return the step that calls :meth:`decompose`; ``is_shared``: of which several processes share the experts."""
        each = {"each": dealt} if is_shared else {}
        return CompressionStep(
            statistics,
            lambda view, moments, _: self.decompose(view, moments, ranks, **each),
            shared=tuple(ranks) if is_shared else (),
        )

    def prunable_modules(self, view: BlockView) -> list[PrunableModule]:
        """The ranks to choose in this block; weights may be on the meta device."""
        raise NotImplementedError

    def expert_counts(self, view: BlockView) -> PrunableModule | None:
        """How many experts of this block may stay, where an allocation may choose that beside their width; by default
        all do."""
        return None

    def joined(self, modules: list[PrunableModule], views: Sequence[BlockView]) -> list[PrunableModule]:
        """Modules of all blocks, one for those of several blocks that must have one rank; as they are by default."""
        return modules

    def parameter_change(self, view: BlockView, ranks: dict[str, int]) -> tuple[int, int]:
        """``(change in parameters, bytes of codes and indices added)`` in a block at these ranks, biases included."""
        raise NotImplementedError

    @property
    def caution(self) -> str:
        """Return a sentence on options known to lose much together, for the plan; empty where there are none."""
        return ""

    def added_products(self, view: BlockView, ranks: dict[str, int]) -> int:
        """How many more matrix products a token goes through in a block: 0 where matrices only shrink."""
        return 0

    def float_change(self, view: BlockView, ranks: dict[str, int]) -> int:
        """Change in the numbers a block keeps in the model's dtype: not all parameters where a method quantises."""
        return self.parameter_change(view, ranks)[0]

    def cached_numbers(self, view: BlockView, ranks: dict[str, int]) -> int:
        """Return the numbers that the key/value cache of this block holds per token at these ranks.

        A module that ``ranks`` leaves out is dense, so that a budget can price one module; rank 0 is what remains
        without it.
        """
        return view.attention.cached

    def work(self, view: BlockView, ranks: dict[str, int]) -> Work:
        """Count the work of compressing a block to these ranks (:mod:`.work`); weights may be on the meta device."""
        return Work()

    def singular_value_effects(self, view: BlockView, moments: BlockMoments) -> dict[str, list[float]]:
        """Return module -> expected change of the loss without each singular value; for the allocation ``zero-sum``."""
        raise NotImplementedError

    def decompose(self, view: BlockView, moments, ranks: dict[str, int]) -> BlockResult:
        """Compress one block to the given ranks (module -> rank) in one step."""
        raise NotImplementedError


@dataclass(frozen=True)
class NarrowingMethod(Method):
    """A method that makes layers narrower, in steps.

    Attributes:
        rank_multiple: ranks are multiples of this.
    """

    rank_multiple: int = 8

    def __post_init__(self):
        super().__post_init__()
        if self.rank_multiple < 1:
            raise OptionError(f"rank_multiple must be >= 1, got {self.rank_multiple}")


@dataclass(frozen=True)
class MeasurableMethod(NarrowingMethod):
    """A method whose modules can be compressed and timed one by one: what ``Measured`` and ``Latency`` need."""

    allocations: ClassVar[tuple[type[Allocation], ...]] = (*NarrowingMethod.allocations, Measured)
    budgets: ClassVar[tuple[type[Budget], ...]] = (*NarrowingMethod.budgets, Latency)

    def alone(self, view: BlockView) -> Self:
        """Return the form of this method that fits every module in one stage, on the dense model."""
        return self

    def curve(self, view: BlockView, moments: BlockMoments, unit: PrunableModule, least: int) -> Curve:
        """Compute what a module would lose at its ranks from ``least`` on."""
        raise NotImplementedError

    def work_of_curve(self, view: BlockView, unit: PrunableModule, least: int) -> Work:
        """Count the linear algebra of :meth:`curve`."""
        return Work()

    def truncated(self, view: BlockView, ranks: dict[str, int]) -> BlockResult:
        """Return modules of these shapes, made of the first units and dimensions: only to be timed."""
        raise NotImplementedError
