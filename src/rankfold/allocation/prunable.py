"""What an allocation chooses the ranks of."""

from bisect import bisect_left
from dataclasses import dataclass

Ranks = dict[tuple[int, str], int]  # (block, module) -> rank
# (block, module) -> rank -> what it costs, for ranks down to some least one; 0 where the module stays dense.
RankCosts = dict[tuple[int, str], dict[int, float]]


@dataclass(frozen=True)
class PrunableModule:
    """A module of a block, the ranks it may take, and what it then takes of the budget."""

    block: int
    module: str
    ranks: tuple[int, ...]  # ascending; the last one leaves the module dense
    sizes: tuple[int, ...]  # weights stored at each rank, ascending; or what else the budget counts
    # More blocks, whose module of this name is as large and has the same rank; sizes are of all together.
    members: tuple[int, ...] = ()
    fixed: bool = False  # an option of the method has chosen the first rank; the budget chooses the others around it

    @property
    def key(self) -> tuple[int, str]:
        return self.block, self.module

    @property
    def dense(self) -> int:
        return self.sizes[-1]

    def size(self, rank: int) -> int:
        """Return what it takes at one of its ranks; of the tens of thousands of a wide MLP it is found by halving."""
        return self.sizes[self.ranks.index(rank, bisect_left(self.ranks, rank))]
