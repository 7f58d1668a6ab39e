"""What a sparsity is a fraction of: weights, bytes (with or without the cache), multiply-accumulates or time, as
integers.

A unit's sizes come in weights; here they become what the method's budget counts. A rank that takes no less than a
larger one is no choice then.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import nn
from transformers.pytorch_utils import Conv1D

from .._utils.processes import from_first
from ..allocation import Bytes, ContextBudget, block_weights, check_reachable, unique_parameters
from ..allocation.one_rank import Level
from ..architectures import Architecture, BlockView
from ..checkpoint.removable import blocks_that_stay
from ..errors import OptionError, UnsupportedModelError
from ..methods import BLOCK, MeasurableMethod, Method, PrunableModule, fitted
from ..models.dense_model import DenseModel
from .latency import LatencyTable, likeness, measure_latency, read_latency_table, write_latency_table

Size = Callable[[BlockView, PrunableModule, int], int]  # of a module at a rank, in what the budget counts
Price = tuple[Size, int, dict[str, Any]]  # with what there is of it in all, and facts for the record


class RankOptions(NamedTuple):
    """The ranks there are to choose from, and what the sparsity is a fraction of."""

    units: list[PrunableModule]  # sizes in weights
    weights: int  # of the blocks, or of the model
    priced: list[PrunableModule]  # sizes in what the budget counts
    counted: int
    facts: dict[str, Any]  # of the budget, for the record
    experts: list[PrunableModule]  # how many may stay of every block that has any; empty where all do
    priced_experts: list[PrunableModule]

    def with_experts(self, level: Level) -> "RankOptions":
        """Return what there is to choose from where so many experts stay, by their full number."""
        units, priced = (
            _with_experts(some, experts, level)
            for some, experts in ((self.units, self.experts), (self.priced, self.priced_experts))
        )
        return self._replace(units=units, priced=priced, experts=[], priced_experts=[])

    def check(self, method: Method) -> None:
        """Raise :class:`OptionError` where the sparsity cannot be reached, whatever is measured."""
        check_reachable(self.priced, method, self.counted)


def _with_experts(units: list[PrunableModule], experts: list[PrunableModule], level: Level) -> list[PrunableModule]:
    """Size the widths of experts for those that stay; what goes with the others is a module that is not chosen."""
    full = {unit.block: unit.ranks[-1] for unit in experts}
    found = []
    for unit in units:
        if unit.module == "experts":
            of = full[unit.block]
            unit = replace(unit, sizes=tuple(size // of * level[of] for size in unit.sizes))
        found.append(unit)
    for unit in experts:
        of = unit.ranks[-1]
        gone = unit.dense - unit.size(level[of])
        found.append(replace(unit, ranks=(level[of], of), sizes=(0, gone), fixed=True))
    return found


def rank_options(source: DenseModel, method: Method, kept: Path | None = None) -> RankOptions:
    """Return the ranks of all blocks under the budget of a method.

    Args:
        source: an open model; its weights may be on the meta device, except where time is measured.
        method: what to do.
        kept: file that measured times are read from where it exists, and written to; so a run that goes on plans the
            same.

    Raises:
        OptionError: no module is left to compress.
        UnsupportedModelError: multiply-accumulates of a mixture of experts; the cache of an encoder; blocks to remove
            that know their numbers.
    """
    views = source.meta_blocks()
    units = method.joined([u for view in views for u in fitted(method.prunable_modules(view), view, method)], views)
    if any(unit.module == BLOCK for unit in units):
        stay = blocks_that_stay(source)
        units = [replace(u, ranks=u.ranks[-1:], sizes=u.sizes[-1:]) if u.block in stay else u for u in units]
    if not units:
        raise OptionError("no module is left to compress; see `rankfold models` for what each family allows")
    whole = source.model if method.scope == "model" else source.blocks
    weights = unique_parameters(whole) if method.scope == "model" else sum(map(block_weights, source.blocks))
    experts = [unit for view in views if (unit := method.expert_counts(view))]
    budget, counts = method.budget, {"counts": method.budget.counts}
    if not isinstance(budget, ContextBudget):
        return RankOptions(units, weights, units, weights, counts, experts, experts)
    context = min(budget.context, source.context_length)
    if isinstance(budget, Bytes):
        size, counted, facts = _bytes(source, method, whole, context, budget.batch)
    elif budget.is_timed:  # which only methods of this class take
        size, counted, facts = _latency(source, cast("MeasurableMethod", method), units, context, kept)
    else:
        size, counted, facts = _flops(source, whole, context)
    priced, priced_experts = _priced(source, units, size), _priced(source, experts, size)
    return RankOptions(units, weights, priced, counted, counts | facts, experts, priced_experts)


def check_by_shapes(source: DenseModel, method: Method) -> None:
    """Raise :class:`OptionError` where the sparsity cannot be reached; of a budget in time nothing is known before it
    is measured."""
    if not method.budget.is_timed:
        rank_options(source, method).check(method)


def _bytes(source: DenseModel, method: Method, whole: nn.Module, context: int, batch: int) -> Price:
    """Count bytes of the checkpoint: what changes with a rank, biases, codes and indices included.

    With a batch also of the cache of so many sequences of ``context`` tokens, in the dtype of the weights.
    """
    if batch and not source.architecture.decoder:
        raise UnsupportedModelError(
            f"{source.architecture.model_type} is an encoder and caches nothing; leave its batch out"
        )
    item = source.dtype.itemsize
    tokens = batch * context

    def size(view: BlockView, unit: PrunableModule, rank: int) -> int:
        ranks = {unit.module: rank}
        dense = unique_parameters(view.module) if unit.module == BLOCK else unit.dense
        cached = method.cached_numbers(view, ranks) - method.cached_numbers(view, {unit.module: 0}) if tokens else 0
        floats = dense + method.float_change(view, ranks) + tokens * cached
        return floats * item + method.parameter_change(view, ranks)[1]

    counted = unique_parameters(whole) + tokens * sum(view.attention.cached for view in source.meta_blocks())
    return size, counted * item, {"context": context, "batch": batch} if tokens else {}


def _flops(source: DenseModel, whole: nn.Module, context: int) -> Price:
    """Count a weight of a linear layer once, and a query head dimension once for each of ``context`` positions."""
    check_countable(source.architecture, "use another budget")

    def size(view: BlockView, unit: PrunableModule, rank: int) -> int:
        return unit.size(rank) + attended_macs(view, unit.module, rank) * context

    attention = [view.attention for view in source.meta_blocks()]
    passed = whole.modules()
    if whole is source.model:
        passed = token_modules(source.model, source.architecture, writes=not source.part.takes_images)
    linear = sum(m.weight.numel() for m in passed if isinstance(m, nn.Linear | Conv1D))
    return size, linear + sum(2 * a.heads * a.head_dim * context for a in attention), {"context": context}


def check_countable(architecture: Architecture, advice: str) -> None:
    """Raise :class:`UnsupportedModelError` where multiply-accumulates do not follow from shapes."""
    if architecture.mixers:
        raise UnsupportedModelError(
            f"{architecture.model_type} mixes tokens by more than attention, whose multiply-accumulates no formula "
            f"here counts; {advice}"
        )
    if architecture.experts or architecture.mlp is None:
        raise UnsupportedModelError(
            f"{architecture.model_type} routes tokens to experts, so its multiply-accumulates are not a matter of "
            f"shapes; {advice}"
        )


def token_modules(model: Any, architecture: Architecture, *, writes: bool = True) -> list[nn.Module]:
    """Return the modules that a token goes through: those around the blocks, and the head where it ``writes`` text."""
    around = architecture.blocks if architecture.is_projector else architecture.blocks.rpartition(".")[0]
    parts = (model.get_submodule(around), model.get_output_embeddings() if writes else None)
    return [module for part in parts if part is not None for module in part.modules()]


def attended_macs(view: BlockView, module: str, rank: int) -> int:
    """Count the multiply-accumulates of a token's attention with one position, as far as they go with its rank."""
    attention = view.attention
    if module == BLOCK:
        return 2 * attention.heads * attention.head_dim * rank
    if module == "heads":  # queries of each key/value head left, their scores and their values
        return 2 * attention.head_dim * (attention.heads // attention.kv_heads) * rank
    return attention.heads * rank if module in ("qk", "vo") else 0


def _latency(
    source: DenseModel, method: MeasurableMethod, units: list[PrunableModule], context: int, kept: Path | None
) -> Price:
    """Count nanoseconds of a forward of ``context`` tokens through all blocks, by tables measured on this device."""
    times = from_first(lambda: _latency_table(source, method, units, context, kept))
    tables = {(b, t.module): t for t in times.tables for b in t.blocks}

    def size(view: BlockView, unit: PrunableModule, rank: int) -> int:
        return tables[unit.key].nanoseconds(rank)

    return size, times.nanoseconds, times.describe()


def _latency_table(
    source: DenseModel, method: MeasurableMethod, units: list[PrunableModule], context: int, kept: Path | None
) -> LatencyTable:
    if kept is not None and kept.exists():
        return read_latency_table(kept)
    times = measure_latency(source, method, units, context)
    if kept is not None:
        write_latency_table(kept, times)
    return times


def _priced(source: DenseModel, units: list[PrunableModule], size: Size) -> list[PrunableModule]:
    """Size units in what the budget counts; of ranks that take the same the largest stays. Count alike blocks once."""
    found: dict[tuple, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    priced = []
    for unit in units:
        view = source.meta_block(unit.block)
        key = likeness(view), unit.module, unit.ranks, unit.sizes  # blocks at an end may have other ranks
        if key not in found:
            found[key] = _falling(unit.ranks, [size(view, unit, rank) for rank in unit.ranks])
        ranks, sizes = found[key]
        priced.append(replace(unit, ranks=ranks, sizes=sizes))
    return priced


def _falling(ranks: tuple[int, ...], sizes: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Keep ranks whose size is below that of every larger one; every rank but 0, with which biases go too, takes
    something."""
    kept = [len(ranks) - 1]
    for n in range(len(ranks) - 2, -1, -1):
        if (ranks[n] == 0 or sizes[n] > 0) and sizes[n] < sizes[kept[-1]]:
            kept.append(n)
    return tuple(ranks[n] for n in kept[::-1]), tuple(sizes[n] for n in kept[::-1])
