"""How long a block takes at which ranks, on this device: what a budget in time is counted by.

Blocks of one shape share their tables. A block runs with one of its modules at a rank, made of its first units or
dimensions, beside the dense one in turning order; a few ranks are timed and what lies between is interpolated.
"""

import statistics
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from .._utils.files import read_json, write_json
from .._utils.hardware import in_rounds, seconds_of
from .._utils.memory import release_memory
from .._utils.progress import track
from ..architectures import BlockView
from ..calibration.runner import start
from ..data.batches import noise
from ..errors import CheckpointError
from ..methods import MeasurableMethod, PrunableModule
from ..models.dense_model import DenseModel
from .replace import replaced, swapped

POINTS = 5  # ranks of a module that are timed, from the smallest to the one below full
ROUNDS = 7  # that medians are taken over, after one that does not count
LEAST_SECONDS = 0.01  # a measurement takes; short blocks run several times


@dataclass(frozen=True)
class ModuleLatency:
    """One module of blocks that are alike."""

    blocks: tuple[int, ...]
    module: str
    full: int
    # Rank -> seconds that a forward of the block is shorter than the dense one; without the full rank.
    saved: dict[int, float]

    def nanoseconds(self, rank: int) -> int:
        """Return what the module takes: a share of its block's time that falls to nothing at rank 0, less what the rank
        saves.

        The savings that were measured are made to fall with the rank (least squares) and interpolated.
        """
        if not self.saved:
            return 1
        ranks = sorted(self.saved)
        savings = _falling([self.saved[r] for r in ranks])
        own = max(savings[0] * self.full / (self.full - ranks[0]), 1e-9)
        return round(1e9 * (own - self._interpolated(dict(zip(ranks, savings, strict=True)), rank)))

    def _interpolated(self, savings: dict[int, float], rank: int) -> float:
        if rank == self.full:
            return 0.0
        for a, b in pairwise(savings):
            if a <= rank <= b:
                return savings[a] + (savings[b] - savings[a]) * (rank - a) / (b - a)
        return next(iter(savings.values()))  # only one was timed


@dataclass(frozen=True)
class LatencyTable:
    """All tables, and what they were measured on."""

    tables: tuple[ModuleLatency, ...]
    seconds: float  # of a forward through all dense blocks
    facts: dict

    @property
    def nanoseconds(self) -> int:
        return round(1e9 * self.seconds)

    def describe(self) -> dict:
        """Return all of it, for the record."""
        rows = [
            {"blocks": list(t.blocks), "module": t.module, "full": t.full, "saved": [list(p) for p in t.saved.items()]}
            for t in self.tables
        ]
        return {**self.facts, "seconds": self.seconds, "tables": rows}


def likeness(view: BlockView) -> str:
    """Return what is equal for blocks of the same shapes and the same kind of attention."""
    shapes = [(name, *p.shape) for name, p in view.module.named_parameters()]
    attention = view.attention
    # Of what stays as it is only shapes are known.
    settings = {} if attention.spec.unsupported_reason else attention.runtime()
    return repr((shapes, attention.rotary_dim, sorted(settings.items(), key=lambda item: item[0])))


@torch.no_grad()
def measure_latency(
    source: DenseModel, method: MeasurableMethod, units: list[PrunableModule], context: int
) -> LatencyTable:
    """Time every module at a few ranks, in the dtype that is written, with the threads there are.

    Args:
        source: an open model.
        method: one that takes the budget ``latency``.
        units: of all blocks.
        context: tokens of the one sequence that is run.

    Cost: some 130 forwards of each kind of block.
    """
    stream = start(source, noise(source.part, 1, context), autocast=None)
    stream.check_apart(source.name)
    alike: dict[str, list[int]] = {}
    for index in range(len(source)):
        alike.setdefault(likeness(source.meta_block(index)), []).append(index)
    tables, seconds = [], 0.0
    for blocks in track(list(alike.values()), "timing"):
        view = source.block(blocks[0])
        view.module.to(source.dtype)
        mine = [unit for unit in units if unit.block == blocks[0]]
        variants = _variants(source, method, view, mine)
        dense, saved = _time(view, variants, stream, source)
        seconds += dense * len(blocks)
        for unit in mine:
            points = {rank: s for (module, rank), s in saved.items() if module == unit.module}
            tables.append(ModuleLatency(tuple(blocks), unit.module, unit.ranks[-1], points))
        del view, variants
        release_memory()
    dtype = str(source.dtype).removeprefix("torch.")
    facts = {"context": context, "device": source.device.type, "threads": torch.get_num_threads(), "dtype": dtype}
    return LatencyTable(tuple(tables), seconds, facts)


def _variants(source: DenseModel, method: MeasurableMethod, view: BlockView, units: list[PrunableModule]) -> dict:
    """Return ``(module, rank)`` -> path -> the smaller modules of the block, in the dtype that is written."""
    found = {}
    for unit in units:
        below = unit.ranks[:-1]
        points = sorted({below[round(i * (len(below) - 1) / (POINTS - 1))] for i in range(POINTS)}) if below else []
        for rank in points:
            result = method.truncated(view, {unit.module: rank})
            with replaced(view, result, source):
                smaller = {path: view.module.get_submodule(path) for path in result.modules}
            found[unit.module, rank] = {path: module.to(source.dtype) for path, module in smaller.items()}
    return found


def _time(view: BlockView, variants: dict, stream, source: DenseModel) -> tuple[float, dict]:
    """Time the dense block, and what each variant saves: medians over rounds of all of them in turning order."""
    args, kwargs = _cast(stream.calls[0][view.index][:2], source.dtype)
    hidden = view.taken(stream.hidden[0].to(source.dtype))

    def run(modules: dict, repeats: int) -> float:
        with swapped(view.module, modules):
            return _run(view.module, (hidden, *args), kwargs, repeats, source.device)

    every = {None: {}} | variants
    repeats = 1 + int(LEAST_SECONDS / min(run(modules, 1) for modules in every.values()))  # warms up caches and kernels
    rounds = [*in_rounds({name: partial(run, modules, repeats) for name, modules in every.items()}, range(ROUNDS))]
    saved = {name: statistics.median(r[None] - r[name] for r in rounds) for name in variants}
    return statistics.median(r[None] for r in rounds), saved


def _run(module: nn.Module, args, kwargs, repeats: int, device: torch.device) -> float:
    def repeated() -> None:
        for _ in range(repeats):
            module(*args, **kwargs)

    return seconds_of(repeated, device) / repeats


def _cast(value, dtype: torch.dtype):
    """Convert floating tensors in any nest of tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(v, dtype) for key, v in value.items()}
    return tuple(_cast(v, dtype) for v in value) if isinstance(value, tuple | list) else value


def _falling(values: list[float]) -> list[float]:
    """Return the nearest sequence that never rises, in least squares: average neighbours that rise until none do."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
    return [value for value, n in pools for _ in range(n)]


def write_latency_table(path: Path, times: LatencyTable) -> None:
    """Keep times in a file."""
    write_json(path, times.describe())


def read_latency_table(path: Path) -> LatencyTable:
    """Read a table out of a file.

    Raises:
        CheckpointError: it is not what :func:`write_latency_table` wrote.
    """
    try:
        facts = read_json(path, path.parent)
        tables = tuple(
            ModuleLatency(
                tuple(row["blocks"]), row["module"], int(row["full"]), {int(r): float(s) for r, s in row["saved"]}
            )
            for row in facts.pop("tables")
        )
        return LatencyTable(tables, float(facts.pop("seconds")), facts)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); remove {path.parent} and start again") from error
