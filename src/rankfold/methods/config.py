"""Options that all methods share, and their checks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import ClassVar, Literal, get_args, get_origin

from ..allocation import (
    ALLOCATIONS,
    BUDGETS,
    Allocation,
    Budget,
    Bytes,
    FLOPs,
    Parameters,
    RanksBySparsity,
    Uniform,
    from_text,
)
from ..allocation.named import Named
from ..errors import OptionError, check_choice, method_option, option
from .targets import TARGETS


@dataclass(frozen=True)
class MethodConfig:
    """Options that all methods share; subclasses add their own.

    Attributes:
        sparsity: fraction of the weights to remove, in [0, 1).
        scope: the weights ``sparsity`` counts: the linear weights of the decoder ``blocks``, or the whole ``model``.
        modules: which modules to compress; ``None`` for all that the architecture allows, but queries and keys that it
            normalises, which are taken where ``qk`` is named (docs/method.md). A mapping gives each its own
            sparsity, a fraction of that module's weights (MoDeGPT Tables 29, 31); ``sparsity`` is then not used.
        budget: what the sparsity is a fraction of: :class:`~rankfold.allocation.Parameters`, ``Bytes`` of the
            checkpoint (codes and indices too) with or without the cache, ``FLOPs`` per token, or ``Latency``, the time
            a forward takes on this device; or text, such as ``"bytes:context=4096,batch=8"``.
        allocation: how ranks are chosen: an object out of :data:`rankfold.allocation.ALLOCATIONS`, such as
            ``OWL(spread=0.1)``; or text, such as ``"owl:spread=0.1"``.
        target: what is to run the result: ``transformers`` takes any ranks; ``vllm``, ``llama.cpp`` and ``stock`` take
            those with which nothing has to be padded there (:data:`rankfold.methods.targets.TARGETS`).
        exclude_blocks: blocks left dense; negative numbers count from the end.
    """

    name: ClassVar[str]
    all_modules: ClassVar[tuple[str, ...]]
    modes: ClassVar[tuple[str, ...]] = ("sequential", "one-pass")
    compared_mode: ClassVar[str] = "one-pass"  # of a comparison that names none, where the method has it
    # What it takes, subclasses of these included.
    allocations: ClassVar[tuple[type[Allocation], ...]] = (RanksBySparsity,)
    budgets: ClassVar[tuple[type[Budget], ...]] = (Parameters, Bytes, FLOPs)
    # Module -> another one of the block that has rank 0 where it has, and nowhere else.
    together: ClassVar[Mapping[str, str]] = MappingProxyType({})
    targets: ClassVar[tuple[str, ...]] = ("transformers",)
    can_exclude_blocks: ClassVar[bool] = True  # whether single blocks can be left dense
    needs_experts: ClassVar[bool] = False  # whether it takes models with experts only
    # Matrices in fp64 that decomposing takes at most beside weights and moments, for the plan's estimate of memory: so
    # many of the size of the widest moment, and so many of hidden units by the width of the model.
    workspace: ClassVar[tuple[float, float]] = (1.0, 5.0)  # a copy to measure an error in, and weights
    # Whether its steps hold the weights of the dense block while what the earlier ones made of it is measured.
    holds_dense: ClassVar[bool] = False
    leaves_zeros: ClassVar[bool] = False  # what is removed stays in the tensors, as zeros: nothing gets smaller

    sparsity: float = 0.3
    scope: Literal["blocks", "model"] = "blocks"
    modules: tuple[str, ...] | Mapping[str, float] | None = None
    allocation: Allocation = field(default=Uniform())
    budget: Budget = field(default=Parameters())
    target: Literal["transformers", "vllm", "llama.cpp", "stock"] = "transformers"
    exclude_blocks: tuple[int, ...] = field(default=())

    def __post_init__(self):
        self._make(Allocation, ALLOCATIONS, self.allocations)
        self._make(Budget, BUDGETS, self.budgets)
        for own in fields(self):
            check_type(own.name, getattr(self, own.name), own.default)
            if get_origin(own.type) is Literal:
                check_choice(own.name, getattr(self, own.name), get_args(own.type))
        self._check_exclusion()
        self._check_sparsities()
        self._check_target()

    def _check_sparsities(self) -> None:
        if self.modules is not None and not self.modules:
            raise OptionError("modules is empty; name some, such as mlp, or leave it out for all")
        for what, value in [("sparsity", self.sparsity), *(dict(self.own_sparsities or {}).items())]:
            if not 0 <= value < 1:
                raise OptionError(f"{what} must be in [0, 1), got {value}; 0.3 removes 30 % of the weights")
        if self.budget.is_timed and self.scope == "model":
            raise OptionError(f"budget {self.budget.name} is the time of the blocks, got scope=model; leave it out")
        for module in self.modules or ():
            check_choice("module", module, self.all_modules)

    def _make(self, kind: type[Named], table: Mapping[str, type[Named]], allowed: tuple[type, ...]) -> None:
        """Replace an option given as text by its object."""
        chosen = from_text(kind, getattr(self, kind.kind), table)
        if not isinstance(chosen, allowed):
            names = " or ".join(name for name, cls in table.items() if issubclass(cls, allowed))
            raise OptionError(
                f"method {self.name} takes {kind.kind} {names}, got {chosen.name}; take one of these, or another method"
            )
        object.__setattr__(self, kind.kind, chosen)

    def _check_exclusion(self) -> None:
        if not all(isinstance(block, int) and not isinstance(block, bool) for block in self.exclude_blocks):
            raise OptionError(f"exclude_blocks takes block numbers such as (0, -1), got {self.exclude_blocks!r}")
        if self.exclude_blocks and not self.can_exclude_blocks:
            raise OptionError(
                f"method {self.name} gives several blocks one width, basis or number of experts, so none can be "
                f"excluded, got {self.exclude_blocks}; leave exclude_blocks out"
            )

    def _check_target(self) -> None:
        if self.target not in self.targets:
            raise OptionError(
                f"method {self.name} writes for {', '.join(self.targets)}, got {method_option('target', self.target)}; "
                f"leave it out, or take {option('method', 'rankfold')}"
            )
        if not TARGETS[self.target].common:
            return
        if not isinstance(self.allocation, Uniform):
            raise OptionError(
                f"{method_option('target', self.target)} gives all MLPs one width, got allocation {self.allocation}; "
                "take allocation uniform"
            )
        if self.exclude_blocks:
            raise OptionError(
                f"{method_option('target', self.target)} gives all MLPs one width, got exclude_blocks "
                f"{self.exclude_blocks}; leave it out"
            )

    @property
    def one_rank(self) -> bool:
        """Whether all blocks must have the same rank, or the same share of modules that differ in width."""
        return TARGETS[self.target].common

    @property
    def own_sparsities(self) -> Mapping[str, float] | None:
        return self.modules if isinstance(self.modules, Mapping) else None

    def describe(self) -> dict:
        """All options, for the run record."""
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        options |= {"allocation": str(self.allocation), "budget": str(self.budget)}
        options["modules"] = dict(self.modules) if isinstance(self.modules, Mapping) else options["modules"]
        return {"method": self.name, **options}


def ignored_options(options: Mapping) -> dict[str, str]:
    """Of the options of a method: what nothing reads beside the others -> what it goes with.

    Args:
        options: as :meth:`Method.describe` gives them.
    """
    read = {
        "sparsity": (not isinstance(options.get("modules"), Mapping), "modules that name no sparsity of their own"),
        "rank_multiple": ("rank_multiple" in options, "methods that make layers narrower"),
    }
    return {name: goes_with for name, (is_read, goes_with) in read.items() if not is_read}


def check_type(what: str, value, default) -> None:
    """Raise :class:`OptionError` unless ``value`` is of the kind of an option's ``default``, and a number finite."""
    if what == "modules":
        kinds, kind = (tuple, list, Mapping, type(None)), "names of modules, or a mapping to their sparsities"
        if isinstance(value, Mapping):
            for module, sparsity in value.items():
                check_type(str(module), sparsity, 0.0)
    elif what == "exclude_blocks":
        kinds, kind = (tuple, list), "a tuple of block numbers"
    elif isinstance(default, Named):
        return  # checked where it was made
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
