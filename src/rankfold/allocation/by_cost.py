"""Ranks whose total cost is least: what was measured, and whole blocks."""

from dataclasses import dataclass
from typing import Any, ClassVar

from .base import Allocation, DenseModelMeasures, Share
from .cheapest import cheapest
from .prunable import RankCosts, Ranks


@dataclass(frozen=True)
class ByCost(Allocation):
    """Take the ranks whose measured costs add up to the least."""

    called: ClassVar[str]  # the cost, in the record

    def allocate(self, share: Share, measured: RankCosts) -> tuple[Ranks, dict[str, Any]]:
        ranks = cheapest(share.modules, measured, share.remove, share.counts, share.together)
        costs = {f"{b}.{m}": measured[b, m][rank] for (b, m), rank in ranks.items() if self.is_recorded(rank)}
        return ranks, {self.called: costs}

    def is_recorded(self, rank: int) -> bool:
        """Tell whether the record holds the cost of a module at this rank: by default, of whole removed blocks."""
        return rank == 0


@dataclass(frozen=True)
class Measured(ByCost):
    """Take the ranks that change the predictions least, by error curves and what compressing each module alone does.

    Attributes:
        other_texts: how much the predictions on the probe texts count, texts of six other kinds, beside those on
            held-out calibration text; 0: not at all, 1: nothing else does.
    """

    name: ClassVar[str] = "measured"
    called: ClassVar[str] = "divergence"
    needs_text: ClassVar[bool] = True
    may_exceed: ClassVar[bool] = True

    other_texts: float = 0.0

    def __post_init__(self):
        self.check("other_texts", "in [0, 1]", lambda value: 0 <= value <= 1)

    def __str__(self) -> str:
        return super().__str__() if self.other_texts else self.name  # what records had before there was the option

    def measure(self, dense: DenseModelMeasures) -> RankCosts:
        return dense.kl_sensitivity(self.other_texts)

    def is_recorded(self, rank: int) -> bool:
        return True


@dataclass(frozen=True)
class LeastInfluence(ByCost):
    """Remove the blocks with the smallest influence: ShortGPT (arXiv:2403.03853)."""

    name: ClassVar[str] = "least-influence"
    called: ClassVar[str] = "influence"
    statistic: ClassVar[str | None] = "influence"

    def measure(self, dense: DenseModelMeasures) -> RankCosts:
        return {(block, "block"): {0: mean[0].item(), 1: 0.0} for block, mean in dense.means("influence").items()}


@dataclass(frozen=True)
class Greedy(ByCost):
    """Remove one block after another, each time the one without which the loss is least: SLEB (arXiv:2402.09025)."""

    name: ClassVar[str] = "greedy"
    called: ClassVar[str] = "removed_as_number"
    needs_text: ClassVar[bool] = True

    def measure(self, dense: DenseModelMeasures) -> RankCosts:
        return dense.greedy_block_removal()

    def search_passes(self, blocks: int, removed: int) -> float:
        return sum((blocks - done) ** 2 / 2 for done in range(removed))
