"""One rank for all units, such as the width of a stream that runs through all blocks."""

from .prunable import PrunableModule


def one_rank(units: list[PrunableModule], remove: int) -> int:
    """Return the largest rank that all units may take and that removes enough; there must be one."""
    return max(rank for rank in common_ranks(units) if freed(units, rank) >= remove)


def common_ranks(units: list[PrunableModule]) -> set[int]:
    """Return the ranks that all units may take; of none at all, nothing can go."""
    return set.intersection(*(set(unit.ranks) for unit in units)) if units else {0}


def freed(units: list[PrunableModule], rank: int) -> int:
    """Count what is removed when all units take a rank."""
    return sum(u.dense - u.size(rank) for u in units)


def width_facts(unit: PrunableModule, rank: int) -> dict[str, float]:
    """Describe a rank for the record: the share of ranks that goes is not the share of weights."""
    full = unit.ranks[-1]
    return {"rank": rank, "of": full, "nominal_sparsity": 1 - rank / full}
