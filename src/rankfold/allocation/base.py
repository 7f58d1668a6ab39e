"""What an allocation is: what it measures on the dense model, and how it chooses ranks by that."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from .named import Named
from .prunable import PrunableModule, RankCosts, Ranks
from .sparsities import capped_sparsities, round_sparsities


class DenseModelMeasures(Protocol):
    """What an allocation may ask about the dense model; :mod:`rankfold.compression.importance` answers."""

    def means(self, statistic: str) -> dict[int, Tensor]:
        """Return the mean of a statistic in every block."""
        ...

    def of_blocks(self, score: Callable[[Any], float]) -> dict[int, float]:
        """Return a number of every block, computed from its weights."""
        ...

    def kl_sensitivity(self, other_texts: float) -> RankCosts:
        """Return (block, module) -> rank -> divergence of the predictions with that module alone at that rank.

        Args:
            other_texts: how much the predictions on the probe texts count, in [0, 1].
        """
        ...

    def greedy_block_removal(self) -> RankCosts:
        """Return (block, module) -> rank -> place in the order in which blocks are best removed."""
        ...

    def singular_value_effects(self) -> dict[tuple[int, str], list[float]]:
        """Return (block, module) -> expected change of the loss without each singular value, largest value first."""
        ...


class Share(NamedTuple):
    """Modules that share one budget, and how much of it must be removed."""

    modules: list[PrunableModule]
    asked: int  # what must go
    counted: int  # that the sparsity is a fraction of
    named: str  # that sparsity, for messages
    module: str | None = None  # where a module has its own sparsity
    given: int = 0  # what goes of other modules, whose ranks are fixed
    stays: int = 0  # what could go, but not with all the others
    counts: str = "weights"  # what sizes count, for messages
    together: Mapping[str, str] = MappingProxyType({})  # module -> another one that has rank 0 where it has

    @property
    def remove(self) -> int:
        """Count what must be removed of these modules."""
        return max(0, self.asked - self.given)

    @property
    def dense(self) -> int:
        return sum(module.dense for module in self.modules)


@dataclass(frozen=True)
class Allocation(Named):
    """Which ranks the modules get within a budget.

    Subclasses have a ``name`` and are listed in :data:`rankfold.allocation.ALLOCATIONS`.
    """

    kind: ClassVar[str] = "allocation"
    statistic: ClassVar[str | None] = None  # of the dense model that :meth:`measure` reads
    needs_text: ClassVar[bool] = False  # compares predictions, which moments do not hold
    may_exceed: ClassVar[bool] = False  # removes beyond the budget what costs nothing

    def measure(self, dense: DenseModelMeasures) -> Any:
        """Measure what :meth:`allocate` goes by; nothing by default."""
        return None

    def search_passes(self, blocks: int, removed: int) -> float:
        """Count the block forwards over the calibration tokens that :meth:`measure` takes beside the statistics."""
        return 0.0

    def allocate(self, share: Share, measured: Any) -> tuple[Ranks, dict[str, Any]]:
        """Choose the ranks of modules that share a budget.

        Args:
            share: the modules, and what must be removed.
            measured: of :meth:`measure`.

        Returns:
            ``(ranks, facts for the record)``.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class RanksBySparsity(Allocation):
    """Give every module a real-valued sparsity, and round these to ranks."""

    def sparsities(
        self, modules: list[PrunableModule], weights: Tensor, average: float, measured: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute a sparsity for every module, with weighted mean ``average``; and facts for the record.

        Args:
            modules: of the budget.
            weights: ``(L,)`` dense sizes of these.
            average: sparsity of all together.
            measured: of :meth:`measure`.
        """
        raise NotImplementedError

    def allocate(self, share: Share, measured: Any) -> tuple[Ranks, dict[str, Any]]:
        modules, average = share.modules, share.remove / share.dense
        weights = torch.tensor([m.dense for m in modules], dtype=torch.float64)
        caps = torch.tensor([1 - m.sizes[0] / m.dense for m in modules], dtype=torch.float64)
        phi, facts = self.sparsities(modules, weights, average, measured)
        phi = capped_sparsities(phi, weights, average, caps).tolist()
        return round_sparsities(modules, phi, share.dense - share.remove), facts
