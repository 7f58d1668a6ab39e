"""What compressing each module alone does to the model's predictions, and so what every rank of it would cost.

A module's relative error says nothing about what the rest of the model makes of it. So every module is compressed alone, to
the sparsity that all would have, and its block's output carried through the dense blocks behind it: the divergence of the
predictions there is its effect. Between ranks it grows like the squared error. Only one block is resident at a time; beside
the dense stream as many short ones as modules have been tried so far go through it.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .allocation import Cost, largest_sparsity
from .architectures import BlockView
from .calibration.runner import Stream, advance, keeps_some_logits, logits, measure, start
from .calibration.tokens import Tokens
from .checkpoint.reading import BlockReader
from .checkpoint.source import Source
from .errors import CheckpointError
from .files import read_json, write_json
from .memory import release_memory
from .methods import Method, Unit
from .progress import track
from .replacing import replaced

__all__ = ["Costs", "measure_costs", "read_costs", "write_costs"]

Costs = dict[tuple[int, str], Cost]  # (block, module) -> rank -> nats per token

FIT_TOKENS = 16384  # that curves are measured on
PER_DIMENSION = 4  # as many more for wide MLPs as make a moment of full rank
WINDOWS, LENGTH = 4, 128  # that predictions are compared on
POSITIONS = 128  # whose predictions are compared at once: a vocabulary is large


@torch.no_grad()
def measure_costs(source: Source, method: Method, tokens: Tokens, units: list[Unit], averages: dict) -> Costs:
    """Expected divergence of the predictions when a module has a rank and all others are dense.

    Args:
        source: an open model.
        method: one that has curves (:meth:`rankfold.methods.Method.curve`).
        tokens: calibration windows; predictions are compared on held-out ones where there are any.
        units: of all blocks.
        averages: ``(block, module)`` -> mean sparsity of the budget it belongs to; units without one stay dense.

    Returns:
        ``(block, module)`` -> rank -> nats per token, mean ``KL(dense || with this module compressed)``.

    Cost: for the curves one pass over 16k tokens or more, for the effects about half a forward of 512 tokens for every module.
    """
    units = [unit for unit in units if (unit.block, unit.module) in averages]
    if not units:
        return {}
    fit = start(source, _some_to_fit(tokens, units), autocast=source.autocast)
    ids = (tokens.ids if tokens.held_out is None else tokens.held_out)[:WINDOWS, :LENGTH].contiguous()
    tried = start(source, ids, autocast=source.autocast)  # one batch, the dense model's; every module tried adds one
    read, curves = BlockReader(source), {}
    for index in track(range(len(source)), "measuring effects"):
        view = read(index)
        mine = [unit for unit in units if unit.block == index]
        moments = measure(view, fit, method.alone.statistics(view), step=True)
        for unit in mine:
            curves[index, unit.module] = _curve(method, view, moments, unit, averages[index, unit.module])
        ranks = [{unit.module: _reference(unit, averages[index, unit.module])} for unit in mine]
        outputs = [_output(source, method, view, moments, rank, tried) for rank in ranks]
        advance(view, tried)
        tried.hidden += outputs
        del view, moments
        release_memory()
    effects = _divergences(source, ids, tried)
    found = {}
    for unit, effect in zip(units, effects, strict=True):  # in the order they were tried: by block
        key = unit.block, unit.module
        found[key] = _scaled(curves[key], _reference(unit, averages[key]), effect)
    return found


def _some_to_fit(tokens: Tokens, units: list[Unit]) -> Tensor:
    """The first windows, as many as curves need."""
    wanted = max(FIT_TOKENS, PER_DIMENSION * max(unit.ranks[-1] for unit in units))
    return tokens.ids[: -(-wanted // tokens.ids.shape[1])]


def _reference(unit: Unit, average: float) -> int:
    """The rank to try: where the module loses its share, and at least one step."""
    wanted = (1 - average) * unit.dense
    return min(unit.ranks[:-1], key=lambda rank: (abs(unit.size(rank) - wanted), rank), default=unit.ranks[-1])


def _curve(method: Method, view: BlockView, moments, unit: Unit, average: float) -> Cost:
    """Squared relative error at every rank that this average may lead to."""
    allowed = (1 - largest_sparsity(average)) * unit.dense
    least = min(_reference(unit, average), next(rank for rank in unit.ranks if unit.size(rank) >= allowed - 1e-6))
    return method.alone.curve(view, moments, unit, least)


def _output(source: Source, method: Method, view: BlockView, moments, ranks: dict[str, int], tried: Stream) -> Tensor:
    """What the block makes of the dense stream when one of its modules is compressed; the block stays as it is."""
    (stage,) = method.alone.stages(view, ranks)
    with replaced(view, stage.decompose(view, moments, lambda: None), source):
        alone = replace(tried, hidden=tried.hidden[:1])
        advance(view, alone)
    return alone.hidden[0]


def _scaled(curve: Cost, reference: int, effect: float) -> Cost:
    """Between ranks the effect grows like the squared error; a module without error has no effect."""
    return {rank: effect * error / curve[reference] if curve[reference] > 0 else 0.0 for rank, error in curve.items()}


def _divergences(source: Source, ids: Tensor, tried: Stream) -> list[float]:
    """Mean ``KL(dense || tried)`` per position, of every batch behind the first."""
    everything = torch.arange(ids.shape[1], device=source.device)
    totals = torch.zeros(len(tried.hidden) - 1, dtype=torch.float64)
    for some in everything.split(POSITIONS) if keeps_some_logits(source) else [None]:
        dense = logits(source, ids, tried, tried.hidden[0], keep=some).float().log_softmax(-1)
        probable = dense.exp()
        for i, hidden in enumerate(tried.hidden[1:]):
            small = logits(source, ids, tried, hidden, keep=some).float().log_softmax(-1)
            totals[i] += small.neg_().add_(dense).mul_(probable).sum(-1).double().sum().cpu()
    return (totals / ids.numel()).clamp_min(0).tolist()


def write_costs(path: Path, costs: Costs) -> None:
    """Keep costs in a file."""
    write_json(path, {"costs": [[block, module, sorted(cost.items())] for (block, module), cost in costs.items()]})


def read_costs(path: Path) -> Costs:
    """Costs out of a file.

    Raises:
        CheckpointError: it is not what :func:`write_costs` wrote.
    """
    try:
        rows = read_json(path)["costs"]
        return {(block, module): {int(rank): float(c) for rank, c in cost} for block, module, cost in rows}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); remove {path.parent} and start again") from error
