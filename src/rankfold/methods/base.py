"""What every compression method is to the pipeline.

A method says which ranks a block may take and what they cost (:meth:`Method.units`), which statistics it needs
(:meth:`Method.statistics`), and turns a block, its moments and its ranks into smaller modules (:meth:`Method.decompose`).
Allocation, calibration, checkpoints and reports know nothing else about it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from ..architectures import Architecture, BlockView
from ..calibration.moments import BlockMoments
from ..errors import OptionError, check_choice, method_option
from .registry import method_class
from .targets import TARGETS
from .work import Work

__all__ = [
    "BlockResult",
    "CompressionStep",
    "Curve",
    "Method",
    "Unit",
    "ignored_options",
]


@dataclass(frozen=True)
class Unit:
    """One rank to be chosen: a module of a block, the ranks it may take, and what it then takes of the budget."""

    block: int
    module: str
    ranks: tuple[int, ...]  # ascending; the last one leaves the module dense
    sizes: tuple[int, ...]  # weights stored at each rank, ascending; or what else the budget counts
    fixed: bool = False  # an option of the method has chosen the first rank; the budget chooses the others around it

    @property
    def dense(self) -> int:
        return self.sizes[-1]

    def size(self, rank: int) -> int:
        return self.sizes[self.ranks.index(rank)]


class BlockResult(NamedTuple):
    """A compressed block, or what one stage made of it."""

    modules: dict[str, dict]  # path relative to the block -> description (see modules/building.py)
    # Tensor name relative to the block -> value: all of the modules above, and what changes in those of earlier stages.
    state: dict[str, Tensor]
    reports: dict[str, dict]  # module -> what was measured: relative_error, bounds, ...
    # Module -> relative error of its fit on any moments of the same statistics, such as those of windows kept out of the fit.
    # The default is shared by all results, so it cannot be changed: who adds to it gives a dict.
    errors: dict[str, Callable[[BlockMoments], float]] = MappingProxyType({})  # pyright: ignore[reportAssignmentType]
    # (D, r) orthonormal: the block writes the stream in these coordinates, and the next one, whose ``view.basis`` it is, reads
    # it in them. Kept with the run, not in the model. ``None``: in the model's own coordinates.
    basis: Tensor | None = None


class Curve(NamedTuple):
    """What a module would lose at every rank."""

    errors: dict[int, float]  # rank -> squared relative error; 0 where the module stays dense
    # To be put beside the moments of the block, so that decomposing it does not find the same again.
    found: Mapping[str, Any] = MappingProxyType({})


class CompressionStep(NamedTuple):
    """One step of compressing a block, measured on what the steps before it left."""

    statistics: set[str]  # what it reads
    # (the block as it is now, its moments, what measures the same on windows that nothing is fitted to, None without any)
    # -> what is replaced
    decompose: Callable[[BlockView, BlockMoments, Callable[[], BlockMoments | None]], BlockResult]


@dataclass(frozen=True)
class Method:
    """Options that all methods share; subclasses add their own.

    Attributes:
        sparsity: fraction of the weights to remove, in [0, 1).
        of: the weights ``sparsity`` counts: the linear weights of the decoder ``blocks``, or the whole ``model``.
        modules: which modules to compress; ``None`` for all that the architecture allows, but queries and keys that it
            normalises, which are taken where ``qk`` is named (docs/method.md). A mapping gives each its own
            sparsity, a fraction of that module's weights (MoDeGPT Tables 29, 31); ``sparsity`` is then not used.
        budget: what the sparsity is a fraction of: ``parameters``; ``bytes`` of the checkpoint (codes and indices too);
            ``flops``, multiply-accumulates per token; ``latency``, the time a forward takes on this device.
        context: tokens of a sequence, for ``flops``, ``latency`` and ``batch``; clamped to the model's context.
        batch: sequences of ``context`` tokens whose key/value cache ``bytes`` counts beside the weights; 0: the weights alone.
        allocation: ``uniform``; ``influence`` (MoDeGPT Eq. 11); ``influence-modules`` (Eq. 43); ``measured``: the ranks that
            change the predictions least, by the error curve of every module and what compressing it alone does to them;
            ``owl``, blocks with many outliers among their weights lose less; ``spectrum``, what is kept of a block is
            proportional to the effective rank of its weights.
            For methods that remove blocks: ``least-influence``, those with the smallest influence; ``greedy``, one after
            another the one without which the loss is least.
        epsilon: temperature of the influence allocations; ``None`` for the paper's rule, largest layer sparsity 0.8.
        outlier: of ``owl``: a weight is an outlier where its size times the norm of its input is so many times the mean of its
            block, the paper's M.
        spread: of ``owl``: sparsities of blocks differ by at most twice this, the paper's lambda.
        multiple: ranks are multiples of this.
        target: what is to run the result: ``transformers`` takes any ranks; ``vllm``, ``llama.cpp`` and ``stock`` take those
            with which nothing has to be padded there (:data:`rankfold.methods.targets.TARGETS`).
        protect: blocks left dense; negative numbers count from the end.
    """

    name: ClassVar[str]
    all_modules: ClassVar[tuple[str, ...]]
    modes: ClassVar[tuple[str, ...]] = ("sequential", "one-pass")
    allocations: ClassVar[tuple[str, ...]] = ("uniform", "influence", "influence-modules", "owl", "spectrum")
    budgets: ClassVar[tuple[str, ...]] = ("parameters", "bytes", "flops")
    # Module -> another one of the block that has rank 0 where it has, and nowhere else.
    together: ClassVar[Mapping[str, str]] = MappingProxyType({})
    targets: ClassVar[tuple[str, ...]] = ("transformers",)
    protects: ClassVar[bool] = True  # whether single blocks can be left dense
    leaves_zeros: ClassVar[bool] = False  # what is removed stays in the tensors, as zeros: nothing gets smaller
    narrows: ClassVar[bool] = True  # layers get ranks, in steps of `multiple`; otherwise blocks or single weights go

    sparsity: float = 0.3
    of: Literal["blocks", "model"] = "blocks"
    modules: tuple[str, ...] | Mapping[str, float] | None = None
    allocation: Literal[
        "uniform", "influence", "influence-modules", "owl", "spectrum", "measured", "least-influence", "greedy"
    ] = "uniform"
    budget: Literal["parameters", "bytes", "flops", "latency"] = "parameters"
    context: int = 2048
    batch: int = 0
    epsilon: float | None = None
    outlier: float = 5.0
    spread: float = 0.08
    multiple: int = 8
    target: Literal["transformers", "vllm", "llama.cpp", "stock"] = "transformers"
    protect: tuple[int, ...] = field(default=())

    def __post_init__(self):
        for option in fields(self):
            check_type(option.name, getattr(self, option.name), option.default)
        if self.modules is not None and not self.modules:
            raise OptionError("modules is empty; name some, such as mlp, or leave it out for all")
        if not all(isinstance(block, int) and not isinstance(block, bool) for block in self.protect):
            raise OptionError(f"protect takes block numbers such as (0, -1), got {self.protect!r}")
        if self.protect and not self.protects:
            raise OptionError(
                f"method {self.name} narrows the stream that runs through all blocks, so none can be protected, got "
                f"{self.protect}; leave protect out"
            )
        for what, value in [("sparsity", self.sparsity), *(dict(self.own_sparsities or {}).items())]:
            if not 0 <= value < 1:
                raise OptionError(f"{what} must be in [0, 1), got {value}; 0.3 removes 30 % of the weights")
        choices = {"of": ("blocks", "model"), "allocation": self.allocations, "budget": (*Method.budgets, "latency")}
        for key, allowed in choices.items():
            check_choice(key, getattr(self, key), allowed)
        self._check_budget()
        for module in self.modules or ():
            check_choice("module", module, self.all_modules)
        self._check_target()
        if self.multiple < 1:
            raise OptionError(f"multiple must be >= 1, got {self.multiple}")
        if self.epsilon is not None and self.epsilon <= 0:
            raise OptionError(f"epsilon must be > 0, got {self.epsilon}")
        if self.outlier <= 0:
            raise OptionError(f"outlier must be > 0, got {self.outlier}; OWL takes 3 to 10")
        if not 0 <= self.spread < 1:
            raise OptionError(f"spread must be in [0, 1), got {self.spread}; OWL takes 0.02 to 0.2")

    def _check_target(self) -> None:
        check_choice("target", self.target, TARGETS)
        if self.target not in self.targets:
            raise OptionError(
                f"method {self.name} writes for {', '.join(self.targets)}, got {method_option('target', self.target)}; leave "
                "it out, or take --method rankfold"
            )
        if not TARGETS[self.target].common:
            return
        if self.allocation != "uniform":
            raise OptionError(
                f"{method_option('target', self.target)} gives all MLPs one width, got allocation {self.allocation}; take "
                "allocation uniform"
            )
        if self.protect:
            raise OptionError(
                f"{method_option('target', self.target)} gives all MLPs one width, got protect {self.protect}; leave it out"
            )

    @property
    def one_rank(self) -> bool:
        """Whether all blocks must have the same rank."""
        return TARGETS[self.target].common

    def _check_budget(self) -> None:
        if self.context < 1:
            raise OptionError(f"context must be >= 1, got {self.context}; it is the tokens of one sequence")
        if self.batch < 0:
            raise OptionError(f"batch must be >= 0, got {self.batch}; it is the sequences whose cache is counted")
        if self.batch and self.budget != "bytes":
            raise OptionError(
                f"batch {self.batch} counts the cache of so many sequences in the budget bytes, got budget {self.budget}; take "
                "budget bytes, or leave batch out"
            )
        if self.budget not in self.budgets:
            raise OptionError(
                f"method {self.name} takes the budgets {', '.join(self.budgets)}, got {self.budget}; take one of these, or "
                "--method modegpt, which takes all"
            )
        if self.budget == "latency" and self.of == "model":
            raise OptionError("budget latency is the time of the blocks, got of=model; leave it out")

    @property
    def own_sparsities(self) -> Mapping[str, float] | None:
        return self.modules if isinstance(self.modules, Mapping) else None

    def describe(self) -> dict:
        """All options, for the run record."""
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        options["modules"] = dict(self.own_sparsities) if self.own_sparsities else options["modules"]
        return {"method": self.name, **options}

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
        """Names out of :data:`rankfold.calibration.gradients.GRADIENTS` that it reads beside the moments; none by default."""
        return set()

    def shared(self, view: BlockView) -> set[str]:
        """Statistics of all blocks of the dense model that :meth:`sum_up` reads; none by default."""
        return set()

    def sum_up(self, blocks: Iterable[BlockMoments]) -> BlockMoments:
        """What every block is given beside its own moments, of the :meth:`shared` statistics of all blocks."""
        return {}

    def stages(self, view: BlockView, ranks: dict[str, int]) -> list[CompressionStep]:
        """The steps in which a block is compressed to the given ranks (module -> rank); one by default."""
        return [CompressionStep(self.statistics(view), lambda view, moments, _: self.decompose(view, moments, ranks))]

    def units(self, view: BlockView) -> list[Unit]:
        """The ranks to choose in this block; weights may be on the meta device."""
        raise NotImplementedError

    def truncated(self, view: BlockView, ranks: dict[str, int]) -> BlockResult:
        """Modules of the shapes that these ranks lead to, made of the first units and dimensions: only to be timed.

        Methods with the budget ``latency`` have it.
        """
        raise NotImplementedError

    def parameter_change(self, view: BlockView, ranks: dict[str, int]) -> tuple[int, int]:
        """``(change in parameters, bytes of codes and indices added)`` in a block at these ranks, biases included."""
        raise NotImplementedError

    def added_products(self, view: BlockView, ranks: dict[str, int]) -> int:
        """How many more matrix products a token goes through in a block: 0 where matrices only shrink."""
        return 0

    def float_change(self, view: BlockView, ranks: dict[str, int]) -> int:
        """Change in the numbers a block keeps in the model's dtype; not all parameters where a method quantises them."""
        return self.parameter_change(view, ranks)[0]

    def cached_numbers(self, view: BlockView, ranks: dict[str, int]) -> int:
        """Return the numbers that the key/value cache of this block holds per token at these ranks.

        A module that ``ranks`` leaves out is dense; rank 0 is what remains without it, so that a budget can price one module.
        """
        raise NotImplementedError

    def alone(self, view: BlockView) -> "Method":
        """The form of this method that fits every module in one stage, on the dense model; for methods with curves."""
        return self

    def curve(self, view: BlockView, moments: BlockMoments, unit: Unit, least: int) -> Curve:
        """Compute what a module would lose at its ranks from ``least`` on.

        Methods with the allocation ``measured`` have it.
        """
        raise NotImplementedError

    def work(self, view: BlockView, ranks: dict[str, int]) -> Work:
        """Count the linear algebra of compressing a block to these ranks (:mod:`.work`); weights may be on the meta device."""
        return Work()

    def work_of_curve(self, view: BlockView, unit: Unit, least: int) -> Work:
        """Count that of :meth:`curve`."""
        return Work()

    @classmethod
    def search(cls, blocks: int, removed: int) -> float:
        """Block forwards over the calibration tokens that finding the blocks to remove takes, beside those that measure."""
        return 0.0

    def decompose(self, view: BlockView, moments, ranks: dict[str, int]) -> BlockResult:
        """Compress one block to the given ranks (module -> rank) in one step."""
        raise NotImplementedError


def ignored_options(options: Mapping) -> dict[str, str]:
    """Of the options of a method, as :meth:`Method.describe` gives them: what nothing reads beside the others -> what it goes
    with."""
    allocation, budget = options.get("allocation"), options.get("budget")  # records of before have no budget
    influence, owl = allocation in ("influence", "influence-modules"), allocation == "owl"
    read = {
        "sparsity": (not isinstance(options.get("modules"), Mapping), "modules that name no sparsity of their own"),
        "context": (budget in ("flops", "latency") or options.get("batch"), "budget flops or latency, or a batch"),
        "batch": (budget == "bytes", "budget bytes"),
        "epsilon": (influence, "allocation influence or influence-modules"),
        "outlier": (owl, "allocation owl"),
        "spread": (owl, "allocation owl"),
        "multiple": (method_class(options["method"]).narrows, "methods that make layers narrower"),
    }
    return {name: goes_with for name, (is_read, goes_with) in read.items() if not is_read}


def check_type(what: str, value, default) -> None:
    """Raise :class:`OptionError` unless ``value`` is of the kind of an option's ``default``, and a number finite."""
    if what == "modules":
        kinds, kind = (tuple, list, Mapping, type(None)), "names of modules, or a mapping to their sparsities"
        if isinstance(value, Mapping):
            for module, sparsity in value.items():
                check_type(str(module), sparsity, 0.0)
    elif what == "protect":
        kinds, kind = (tuple, list), "a tuple of block numbers"
    elif isinstance(default, bool):
        kinds, kind = (bool,), "true or false"
    elif isinstance(default, int):
        kinds, kind = (int,), "a whole number"
    elif isinstance(default, str):
        kinds, kind = (str,), "text"
    else:
        kinds, kind = (int, float, *([type(None)] if default is None else [])), "a number"
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise OptionError(f"{what} must be {kind}, got {' '.join(repr(value).split())[:80]}")  # in one line
    if isinstance(value, float) and not math.isfinite(value):
        raise OptionError(f"{what} must be a finite number, got {value}")
