"""What a sparsity is a fraction of: weights, bytes (with or without the cache), multiply-accumulates or time, as integers.

A unit's sizes come in weights; here they become what the method's budget counts. A rank that takes no less than a larger one is
no choice then.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..allocation import Parameters, block_weights, unique_parameters
from ..architectures import BlockView
from ..checkpoint.removable import blocks_that_stay
from ..errors import OptionError, UnsupportedModelError
from ..methods import BLOCK, MeasurableMethod, Method, PrunableModule, fitted
from ..models.dense_model import DenseModel
from .latency import likeness, measure_latency, read_latency_table, write_latency_table

__all__ = ["RankOptions", "attended_macs", "rank_options"]


class RankOptions(NamedTuple):
    """The ranks there are to choose from, and what the sparsity is a fraction of."""

    units: list[PrunableModule]  # sizes in weights
    weights: int  # of the blocks, or of the model
    priced: list[PrunableModule]  # sizes in what the budget counts
    counted: int
    facts: dict  # of the budget, for the record


def rank_options(source: DenseModel, method: Method, kept: Path | None = None) -> RankOptions:
    """Ranks of all blocks under the budget of a method.

    Args:
        source: an open model; its weights may be on the meta device, except where time is measured.
        method: what to do.
        kept: file that measured times are read from where it exists, and written to; so a run that goes on plans the same.

    Raises:
        OptionError: no module is left to compress.
        UnsupportedModelError: multiply-accumulates of a mixture of experts; the cache of an encoder; blocks to remove that know
            their numbers.
    """
    views = (source.meta_block(i) for i in range(len(source)))
    units = [unit for view in views for unit in fitted(method.prunable_modules(view), view, method)]
    if any(unit.module == BLOCK for unit in units):
        stay = blocks_that_stay(source)
        units = [replace(u, ranks=u.ranks[-1:], sizes=u.sizes[-1:]) if u.block in stay else u for u in units]
    if not units:
        raise OptionError("no module is left to compress; see `rankfold models` for what each family allows")
    weights = _weights(source, method)
    counts = {"counts": method.budget.counts}
    if isinstance(method.budget, Parameters):
        return RankOptions(units, weights, units, weights, counts)
    context = min(method.budget.context, source.context_length)
    priced, counted, facts = _PRICES[method.budget.name](source, method, units, context, kept)
    return RankOptions(units, weights, priced, counted, counts | facts)


def _weights(source: DenseModel, method: Method) -> int:
    if method.scope == "model":
        return unique_parameters(source.model)
    return sum(block_weights(block) for block in source.blocks)


def _bytes(
    source: DenseModel, method: Method, units: list[PrunableModule], context: int, _
) -> tuple[list[PrunableModule], int, dict]:
    """Of the checkpoint: what changes with a rank, biases, codes and indices included, counts to the byte.

    With a batch also of the cache of so many sequences of ``context`` tokens, in the dtype of the weights.
    """
    batch = method.budget.batch
    if batch and not source.architecture.decoder:
        raise UnsupportedModelError(
            f"{source.architecture.model_type} is an encoder and caches nothing; leave its batch out"
        )
    item = torch.empty((), dtype=source.dtype).element_size()
    tokens = batch * context

    def size(view: BlockView, unit: PrunableModule, rank: int) -> int:
        ranks = {unit.module: rank}
        dense = unique_parameters(view.module) if unit.module == BLOCK else unit.dense
        cached = method.cached_numbers(view, ranks) - method.cached_numbers(view, {unit.module: 0}) if tokens else 0
        floats = dense + method.float_change(view, ranks) + tokens * cached
        return floats * item + method.parameter_change(view, ranks)[1]

    whole = source.model if method.scope == "model" else source.blocks
    counted = unique_parameters(whole) + tokens * sum(source.meta_block(i).attention.cached for i in range(len(source)))
    facts = {"context": context, "batch": batch} if tokens else {}
    return _priced(source, units, size), counted * item, facts


def _flops(
    source: DenseModel, method: Method, units: list[PrunableModule], context: int, _
) -> tuple[list[PrunableModule], int, dict]:
    """Every weight of a linear layer once, and every dimension of a query head once for each of ``context`` positions."""
    if source.architecture.experts or source.architecture.mlp is None:
        raise UnsupportedModelError(
            f"{source.architecture.model_type} routes tokens to experts, so its multiply-accumulates are not a matter of "
            "shapes; use another budget"
        )

    def size(view: BlockView, unit: PrunableModule, rank: int) -> int:
        return unit.size(rank) + attended_macs(view, unit.module, rank) * context

    attention = [source.meta_block(i).attention for i in range(len(source))]
    whole = source.model if method.scope == "model" else source.blocks
    linear = sum(m.weight.numel() for m in whole.modules() if isinstance(m, nn.Linear | Conv1D))
    counted = linear + sum(2 * a.heads * a.head_dim * context for a in attention)
    return _priced(source, units, size), counted, {"context": context}


def attended_macs(view: BlockView, module: str, rank: int) -> int:
    """Multiply-accumulates of a token's attention products with one position, those that go with this module's rank."""
    attention = view.attention
    if module == BLOCK:
        return 2 * attention.heads * attention.head_dim * rank
    if module == "heads":  # queries of each key/value head left, their scores and their values
        return 2 * attention.head_dim * (attention.heads // attention.kv_heads) * rank
    return attention.heads * rank if module in ("qk", "vo") else 0


def _latency(source: DenseModel, method: Method, units: list[PrunableModule], context: int, kept: Path | None):
    """Nanoseconds of a forward of ``context`` tokens through all blocks, from tables that were measured on this device."""
    if kept is not None and kept.exists():
        times = read_latency_table(kept)
    else:
        times = measure_latency(source, cast("MeasurableMethod", method), units, context)
        if kept is not None:
            write_latency_table(kept, times)
    tables = {(b, t.module): t for t in times.tables for b in t.blocks}

    def size(view: BlockView, unit: PrunableModule, rank: int) -> int:
        return tables[unit.block, unit.module].nanoseconds(rank)

    return _priced(source, units, size), times.nanoseconds, times.describe()


_PRICES = {"bytes": _bytes, "flops": _flops, "latency": _latency}


def _priced(
    source: DenseModel, units: list[PrunableModule], size: Callable[[BlockView, PrunableModule, int], int]
) -> list[PrunableModule]:
    """Units in another currency; of ranks that take the same the largest stays. Blocks that are alike are counted once."""
    found: dict[tuple, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    priced = []
    for unit in units:
        view = source.meta_block(unit.block)
        key = likeness(view), unit.module
        if key not in found:
            found[key] = _falling(unit.ranks, [size(view, unit, rank) for rank in unit.ranks])
        ranks, sizes = found[key]
        priced.append(replace(unit, ranks=ranks, sizes=sizes))
    return priced


def _falling(ranks: tuple[int, ...], sizes: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks whose size is below that of every larger one; rank 0 takes nothing, every other something."""
    kept = [len(ranks) - 1]
    for n in range(len(ranks) - 2, -1, -1):
        if (ranks[n] > 0) <= sizes[n] < sizes[kept[-1]]:
            kept.append(n)
    return tuple(ranks[n] for n in kept[::-1]), tuple(sizes[n] for n in kept[::-1])
