"""What compressing each module alone does to the model's predictions, and so what every rank of it would cost.

A module's relative error says nothing about what the rest of the model makes of it. So every module is compressed
alone, to the sparsity that all would have, and its block's output carried through the dense blocks after it: the
divergence of the predictions there is its effect; of an encoder, the change of its last states. Texts of other kinds
may count beside held-out samples: a module may do little for the calibration text and much for source code. Between
ranks the effect grows like the squared error; where a whole module may go, that is tried as well. Only one block is
resident at a time; beside the dense stream as many short ones as there were trials so far go through it.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .._utils.files import read_json, write_json
from .._utils.memory import release_memory
from .._utils.processes import from_first, gather, own_shards, owner_of
from .._utils.progress import count_steps
from .._utils.stopwatch import time_spent
from ..allocation import RankCosts, largest_sparsity
from ..architectures import BlockView
from ..calibration.moments import BlockMoments, wide
from ..calibration.runner import (
    IGNORED,
    Call,
    Stream,
    advance,
    batch_tokens,
    measure,
    outputs,
    outputs_at,
    start,
    targets_of,
)
from ..calibration.store import MomentStore
from ..data.batches import Batch, Data, again, first, length_of, tokens_in
from ..data.calibration_data import CalibrationData
from ..data.probes import KINDS, one_of_each
from ..errors import CheckpointError, NumericsError, OptionError, method_option
from ..methods import MeasurableMethod, PrunableModule
from ..models.block_reader import BlockReader
from ..models.dense_model import DenseModel
from .block import algebra, decompose
from .probe_texts import NoProbeTexts, read_probes
from .replace import replaced

FIT_TOKENS = 8192  # that curves are measured on
PER_DIMENSION = 4  # as many more for wide MLPs as make a moment of full rank
WINDOWS, LENGTH = 4, 128  # that predictions are compared on
SHORT = 64  # tokens of each window where probe texts are compared too, which are as long; there are more windows then
ROWS = 16  # of logits that are compared at a time: those of a whole window do not fit a processor's caches
# Of the largest squared error on a curve: with less a rank loses little but what does nothing, and its effect is
# rounding. Models whose units all do something are far above: SmolLM2 at sparsity 0.3 has 0.09 and more.
MEASURABLE = 1e-3
TOGETHER = 4  # modules tried whose streams go through a block as one batch


@dataclass
class Sensitivity:
    """What is measured of one module: its error at every rank, and the effect of compressing it alone to some."""

    module: PrunableModule
    curve: dict[int, float]  # rank -> squared relative error
    tried: list[int]  # a rank on the curve, and 0 where the module may be removed alone
    # Rank tried -> divergence of the predictions, nats per token.
    effects: dict[int, float] = field(default_factory=dict)

    def costs(self) -> dict[int, float]:
        """Return rank -> nats per token: between ranks the effect grows like the squared error."""
        on_curve = self.tried[0]
        if not all(map(math.isfinite, (*self.effects.values(), *self.curve.values()))):
            raise NumericsError(
                f"compressing {self.module.module} of block {self.module.block} alone changes the predictions by NaN; "
                f"give the model in float32, or take {method_option('allocation', 'uniform')}"
            )
        effect, known = self.effects[on_curve], self.curve[on_curve]
        found = {rank: effect * error / known if known > 0 else 0.0 for rank, error in self.curve.items()}
        if self.module.ranks[0] == 0:  # what is removed with another module is counted there
            found[0] = self.effects.get(0, 0.0)
        return found


@torch.no_grad()
def measure_kl_sensitivity(
    source: DenseModel,
    method: MeasurableMethod,
    tokens: CalibrationData,
    units: list[PrunableModule],
    averages: dict[tuple[int, str], float],
    gradients: MomentStore | None = None,
    *,
    other_texts: float = 0.0,
) -> RankCosts:
    """Measure the expected divergence of the predictions when a module has a rank and all others are dense.

    Args:
        source: an open model.
        method: one that has curves (:meth:`rankfold.methods.Method.curve`).
        tokens: calibration samples; predictions are compared on held-out ones where there are any.
        units: of all blocks.
        averages: ``(block, module)`` -> mean sparsity of the budget it belongs to; units without one stay dense.
        gradients: statistics of a backward pass, where the method reads any.
        other_texts: how much the predictions on a probe text of each kind count, in [0, 1].

    Raises:
        OptionError: probe texts are to count, and the model can read none.

    Returns:
        ``(block, module)`` -> rank -> nats per token, mean ``KL(dense || with this module compressed)``; for an encoder
        the squared relative change of the states after its last norm.

    Cost: for the curves one pass over 8k tokens or more, for the effects about half a forward of 512 tokens for every
    module (896 where probe texts count), and as much again for every one that may be removed as a whole.
    """
    units = [unit for unit in units if unit.key in averages]
    if not units:
        return {}
    search = _Search(source, method, tokens, units, averages, gradients, other_texts)
    with count_steps("measuring sensitivity", len(source)) as advance_bar:
        for begin in range(0, len(source), tokens.shards):
            turn = range(begin, min(begin + tokens.shards, len(source)))
            search.take(turn)
            for _ in turn:
                advance_bar()
    costs = {key: cost for own in gather(search.costs()) for key, cost in own.items()}
    return {unit.key: costs[unit.key] for unit in sorted(units, key=lambda unit: unit.block)}


class _Search:
    """Try the modules of some blocks at a time, one block for each shard; processes share the blocks as they do the
    shards.

    Arguments are those of :func:`measure_kl_sensitivity`.
    """

    def __init__(self, source, method, tokens, units, averages, gradients, other_texts):
        self.source, self.method, self.units, self.averages = source, method, units, averages
        self.gradients, self.shards, self.read = gradients, tokens.shards, BlockReader(source)
        some = first(tokens.ids, fit_tokens(units), source.part)
        self.fit = start(source, some, autocast=source.autocast, shards=tokens.shards, offload=source.offload)
        unseen = tokens.ids if tokens.held_out is None else tokens.held_out
        if other_texts:
            self.ids, self.weights = _with_other_texts(source, unseen, other_texts)
        else:
            self.ids, self.weights = _some_to_compare(source, unseen), None
        self.dense = start(source, self.ids, autocast=source.autocast, most=tokens_in(self.ids, source.part))
        self.together = {} if self.dense.hands_on else _side_by_side(source, self.ids)
        # Of every shard here, what was tried in the blocks that fell to it, and the streams after these trials.
        self.found: dict[int, list[Sensitivity]] = {shard: [] for shard in own_shards(tokens.shards)}
        self.tried = {shard: Stream([], [], source.autocast) for shard in self.found}

    def take(self, turn: range) -> None:
        """Measure some blocks, one after the other; then try what fell to this process, while others do the same."""
        mine: list[tuple[int, BlockView, BlockMoments, Stream]] = []
        for shard, index in enumerate(turn):
            view = self.read(index)
            statistics = self.method.alone(view).statistics(view)
            moments = measure(view, self.fit, statistics, step=True, owner=owner_of(shard, self.shards))
            moments |= self._gradients(index)
            if shard in self.found:
                mine.append((shard, view, moments, self.dense.copy()))
            advance(view, self.dense)
            with _trials_alone():
                for tried in self.tried.values():
                    advance(view, tried)
            del view, moments
            release_memory()
        while mine:
            shard, view, moments, dense = mine.pop(0)
            sent = self._try(shard, view, moments, dense)
            del moments
            self._catch_up(shard, sent, range(view.index + 1, turn.stop))
            del view
            release_memory()

    def _gradients(self, index: int) -> BlockMoments:
        gradients = self.gradients
        return from_first(lambda: gradients[index]) if gradients else {}

    def _try(self, shard: int, view: BlockView, moments: BlockMoments, dense: Stream) -> Stream:
        """Return what the block sends of the dense stream, batch by batch, with one module after another compressed."""
        method, here = self.method, list[Sensitivity]()
        for unit in (unit for unit in self.units if unit.block == view.index):
            average = self.averages[unit.key]
            with algebra(view) as where:
                curve, known = method.alone(where).curve(where, moments, unit, least_rank(unit, average))
            here.append(Sensitivity(unit, curve, _to_try(method, unit, _reference(unit, average, curve))))
            moments |= known  # decomposing it need not compute this again
        self.found[shard] += here
        sent = Stream([], [], self.source.autocast)
        for one, rank in _trials(here):
            _append(sent, _output(self.source, method, view, moments, one.module, rank, dense), {})
        return sent

    def _catch_up(self, shard: int, sent: Stream, behind: range) -> None:
        """Take what was sent through the blocks that the others are behind already."""
        late = Stream([], [], self.source.autocast)
        _append(late, sent, self.together)
        with _trials_alone():
            for index in behind if late.hidden else ():
                advance(self.source.block(index), late)
                release_memory()
        _append(self.tried[shard], late, self.together)

    def costs(self) -> RankCosts:
        """Return what every rank costs that was tried here."""
        for shard, found in self.found.items():
            compared = self.source, self.ids, self.dense, self.tried[shard], self.weights
            effects = _divergences(*compared) if found else []
            for (one, rank), effect in zip(_trials(found), effects, strict=True):
                one.effects[rank] = effect
        return {one.module.key: one.costs() for found in self.found.values() for one in found}


@contextlib.contextmanager
def _trials_alone() -> Iterator[None]:
    """Tell numbers that only a trial makes too large from those of the dense model."""
    try:
        yield
    except NumericsError as error:
        raise NumericsError(
            "the dense model with a single module compressed computes NaN or infinity, and by itself it does not; give "
            f"the model in float32, or take {method_option('allocation', 'uniform')}"
        ) from error


def _trials(sensitivities: list[Sensitivity]) -> list[tuple[Sensitivity, int]]:
    """List what is tried at which ranks, in the order in which it runs."""
    return [(one, rank) for one in sensitivities for rank in one.tried]


def _to_try(method: MeasurableMethod, unit: PrunableModule, reference: int) -> list[int]:
    """List a rank on the curve, and 0 where all of the module may go; modules removed together are tried once."""
    whole = unit.ranks[0] == 0 and unit.module not in method.together
    return [reference, *([0] if whole else [])]


def _side_by_side(source: DenseModel, ids: Data) -> dict[int, list[Call]]:
    """Return rows of up to ``TOGETHER`` copies of these windows -> what the blocks are called with.

    Return nothing for examples, each of which is a batch of its own. Nor can copies share what blocks hand on.
    """
    if not isinstance(ids, Tensor):
        return {}
    most = min(TOGETHER, max(1, batch_tokens(source) // (len(ids) * length_of(ids, source.part))))
    copies = [torch.cat([ids] * n) for n in range(1, most + 1)]
    whole = tokens_in(copies[-1], source.part)
    return {len(some): start(source, some, autocast=source.autocast, most=whole).calls[0] for some in copies}


def _append(tried: Stream, more: Stream, together: dict[int, list[Call]]) -> None:
    """Put what some trials sent after the others: copies of windows into the last batch and new ones, or batches as
    they are.

    Args:
        more: of one trial after the other, all batches of the dense stream.
        together: see :func:`_side_by_side`.
    """
    if not together:
        tried.hidden += more.hidden
        tried.calls += more.calls
    elif more.hidden:
        most = max(together)
        fuller = [tried.hidden.pop()] if tried.hidden and len(tried.hidden[-1]) < most else []
        tried.hidden += torch.cat([*fuller, *more.hidden]).split(most)
        tried.calls = [together[len(hidden)] for hidden in tried.hidden]


def fit_tokens(units: list[PrunableModule]) -> int:
    """Return the calibration tokens that the curves of these modules are measured on, where there are so many."""
    return max(FIT_TOKENS, PER_DIMENSION * max((unit.ranks[-1] for unit in units), default=0))


def _some_to_compare(source: DenseModel, ids: Data) -> Data:
    """Return the beginnings of some windows, images that have as many patches, or as many examples."""
    if not isinstance(ids, Tensor):
        return ids[:WINDOWS]
    if source.part.takes_images:
        return first(ids, WINDOWS * LENGTH, source.part)
    return ids[:WINDOWS, :LENGTH].contiguous()


def _with_other_texts(source: DenseModel, ids: Data, share: float) -> tuple[Tensor, Tensor]:
    """Return the beginnings of windows and of a probe text of each kind, and how much each of these rows counts."""
    probes = read_probes(source)
    if isinstance(probes, NoProbeTexts) or not isinstance(ids, Tensor):
        reason = (isinstance(probes, NoProbeTexts) and probes.reason) or "those are text without images, for decoders"
        raise OptionError(
            f"{method_option('allocation', f'measured:other_texts={share}')} compares predictions on probe texts, and "
            f"{source.name} reads none: {reason}; leave other_texts out"
        )
    own, others = ids[: WINDOWS * LENGTH // SHORT, :SHORT], one_of_each(probes)
    length = min(own.shape[1], others.shape[1])
    parts = ((own, 1 - share), (others, share))
    weights = [torch.full((len(text),), part / len(text), dtype=torch.float64) for text, part in parts]
    return torch.cat([text[:, :length] for text, _ in parts]), torch.cat(weights)


def _reference(unit: PrunableModule, average: float, curve: dict[int, float] | None = None) -> int:
    """Return the rank to try: where the module loses its share, and at least one step; with an error on the curve that
    the predictions can show, as units that do nothing are none."""
    wanted = (1 - average) * unit.dense
    smaller = [rank for rank in unit.ranks[:-1] if rank]
    if curve and max(curve.values()) > 0:
        shows = MEASURABLE * max(curve.values())
        smaller = [rank for rank in smaller if curve.get(rank, 0.0) >= shows]
    return min(smaller, key=lambda rank: (abs(unit.size(rank) - wanted), rank), default=unit.ranks[-1])


def compared_tokens(samples: int, length: int, *, other_texts: float) -> int:
    """Return how many tokens the predictions are compared on, with so many samples of such a length."""
    if not other_texts:
        return min(WINDOWS, samples) * min(LENGTH, length)
    return (min(WINDOWS * LENGTH // SHORT, samples) + len(KINDS)) * min(SHORT, length)


def least_rank(unit: PrunableModule, average: float) -> int:
    """Return where the curve of a module ends."""
    allowed = (1 - largest_sparsity(average)) * unit.dense
    return min(
        _reference(unit, average), next(rank for rank in unit.ranks if rank and unit.size(rank) >= allowed - 1e-6)
    )


def tried_ranks(method: MeasurableMethod, unit: PrunableModule, average: float) -> list[int]:
    """Return the ranks that are tried of a module, as far as that is known without its curve."""
    return _to_try(method, unit, _reference(unit, average))


def _output(
    source: DenseModel,
    method: MeasurableMethod,
    view: BlockView,
    moments: BlockMoments,
    module: PrunableModule,
    rank: int,
    dense: Stream,
) -> Stream:
    """Run the dense stream through the block with one of its modules compressed; the block stays as it is."""
    others = [other for other, this in method.together.items() if this == module.module and rank == 0]
    (stage,) = method.alone(view).stages(view, {module.module: rank, **dict.fromkeys(others, 0)})
    with replaced(view, decompose(stage, view, moments), source), _trials_alone():
        alone = dense.copy()
        advance(view, alone)
    return alone


@time_spent("forward")
def _divergences(
    source: DenseModel, ids: Data, dense: Stream, tried: Stream, weights: Tensor | None = None
) -> list[float]:
    """Return how far the predictions are from the dense model's with every module tried, in turn.

    Args:
        weights: of the rows of ``ids``, with the sum 1; all the same without.
    """
    distance = partial(_divergence, weights=weights) if source.architecture.decoder else _change
    copies = [hidden for batch in tried.hidden for hidden in batch.split(len(dense.hidden[0]))]
    found, counts = [], []
    for number, (batch, hidden) in enumerate(zip(again(ids, dense.hidden), dense.hidden, strict=True)):
        sent = partial(_sent, source, batch, dense)
        expected = sent(hidden)
        apart = distance(expected)
        with _trials_alone():
            found.append(torch.stack([apart(sent(x)) for x in copies[number :: len(dense.hidden)]]))
        counts.append(expected.shape[1])
    weighted = (apart * (count / sum(counts)) for apart, count in zip(found, counts, strict=True))
    return sum(weighted, torch.zeros_like(found[0])).tolist()


def _sent(source: DenseModel, batch: Batch, stream: Stream, hidden: Tensor) -> Tensor:
    """Return the predictions, of an example without the positions that an image follows."""
    if isinstance(batch, Tensor) or batch.ids is None:
        return outputs(source, batch, stream, hidden)
    told = targets_of(source, batch)[0] != IGNORED
    positions = torch.cat([told[1:], told.new_ones(1)]).nonzero().flatten()
    return outputs_at(source, batch, stream, hidden, positions)


def _divergence(logits: Tensor, weights: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return the mean ``KL(these || others)`` per position, as a function of others; ``weights``: of the rows."""
    expected = logits.float().log_softmax(-1).flatten(0, -2)
    probable = expected.exp()

    def distance(others: Tensor) -> Tensor:
        parts = (x.split(ROWS) for x in (others.flatten(0, -2), expected, probable))
        rows = [
            q.float().log_softmax(-1).neg_().add_(log_p).mul_(p).sum(-1) for q, log_p, p in zip(*parts, strict=True)
        ]
        of_rows = wide(torch.cat(rows)).unflatten(0, (len(logits), -1)).mean(1)
        return (of_rows.mean() if weights is None else of_rows @ weights.to(of_rows)).clamp_min(0.0)

    return distance


def _change(states: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the squared relative change of states, as a function of others."""
    states = states.float()

    def energy(x: Tensor) -> Tensor:
        return wide(x.square().sum(-1)).sum()

    whole = energy(states)
    return lambda others: energy(others.float() - states) / whole


def write_costs(path: Path, costs: RankCosts) -> None:
    """Keep costs in a file."""
    write_json(path, {"costs": [[block, module, sorted(cost.items())] for (block, module), cost in costs.items()]})


def read_costs(path: Path) -> RankCosts:
    """Read costs out of a file.

    Raises:
        CheckpointError: it is not what :func:`write_costs` wrote.
    """
    try:
        rows = read_json(path, path.parent)["costs"]
        return {(block, module): {int(rank): float(c) for rank, c in cost} for block, module, cost in rows}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); remove {path.parent} and start again") from error
