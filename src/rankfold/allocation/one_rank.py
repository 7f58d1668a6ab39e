"""One rank for all modules that are equally wide: the stream that runs through all blocks, or what a config says once.

Modules of several widths, such as those of dense blocks and of experts, keep about the same share of it.
"""

from bisect import bisect_right

from .prunable import PrunableModule, Ranks

Level = dict[int, int]  # full rank -> rank


def levels(units: list[PrunableModule]) -> list[Level]:
    """Return the ranks that all units may take together, ascending; nothing where there are no units."""
    common: dict[int, set[int]] = {}
    for unit in units:
        full = unit.ranks[-1]
        common[full] = common.get(full, set(unit.ranks)) & set(unit.ranks)
    ascending = {full: sorted(ranks) for full, ranks in common.items()}
    shares = sorted({rank / full for full, ranks in ascending.items() for rank in ranks})
    return [
        {full: ranks[max(0, bisect_right(ranks, share * full * (1 + 1e-12)) - 1)] for full, ranks in ascending.items()}
        for share in shares
    ]


def one_rank(units: list[PrunableModule], remove: int) -> Level:
    """Return the largest of these that removes enough; there must be one."""
    return next(level for level in reversed(levels(units)) if freed(units, level) >= remove)


def most_freed(units: list[PrunableModule]) -> int:
    """Count what is removed at the smallest of these."""
    return freed(units, levels(units)[0]) if units else 0


def at(units: list[PrunableModule], level: Level) -> Ranks:
    """Return the rank of every unit."""
    return {unit.key: level[unit.ranks[-1]] for unit in units}


def freed(units: list[PrunableModule], level: Level) -> int:
    """Count what is removed."""
    return sum(unit.dense - unit.size(level[unit.ranks[-1]]) for unit in units)


def width_facts(unit: PrunableModule, rank: int) -> dict[str, float]:
    """Describe a rank for the record: the share of ranks that goes is not the share of weights."""
    full = unit.ranks[-1]
    return {"rank": rank, "of": full, "nominal_sparsity": 1 - rank / full}
