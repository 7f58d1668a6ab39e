"""One block through the stages of a method: measure it as it is, decompose, replace."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from .._utils.memory import release_memory
from .._utils.present import present
from .._utils.processes import broadcast, is_first, process_count, process_index
from .._utils.stopwatch import time_spent
from ..architectures import BlockView
from ..calibration.moments import BlockMoments, moved
from ..calibration.providers import MomentProvider
from ..calibration.store import MomentStore
from ..errors import NumericsError
from ..methods import BlockResult, CompressionStep, Method
from ..models.dense_model import DenseModel
from .held_out import HeldOut
from .replace import replace


class RunContext(NamedTuple):
    """What the steps of every block need."""

    source: DenseModel
    method: Method
    provider: MomentProvider
    held_out: HeldOut | None  # samples that nothing is fitted to
    gradients: MomentStore | None  # of the dense model, where the method reads any
    shared: Callable[[int], BlockMoments]  # block -> what it reads of other blocks of the dense model, likewise


def run_stages(context: RunContext, view: BlockView, ranks: dict[str, int]) -> tuple[BlockView, BlockResult]:
    """Compress a block: replace its modules by smaller ones."""
    whole = BlockResult()
    for stage in context.method.stages(view, ranks):
        if stage.attention_stays:
            for follower in filter(None, (context.provider, context.held_out)):
                follower.keep_mixed(view)
        result = _run_stage(context, view, stage)
        view, whole = replace(view, result, context.source), _added(whole, result)
    return view, whole


def _run_stage(context: RunContext, view: BlockView, stage: CompressionStep) -> BlockResult:
    """Measure the block as it is, and decompose it; several processes share the pieces of a step."""
    pieces = stage.pieces or (stage,)
    owners = _owners(context, view, pieces)
    where = {name: owner for piece, owner in zip(pieces, owners, strict=True) for name in piece.statistics}
    everywhere = set().union(*(piece.statistics for piece in pieces if piece.shared))
    moments = _sent_to_all(context.provider.measure(view, stage.statistics, where), everywhere)
    unseen = context.held_out
    # Late, because moments are large.
    held_out = functools.cache(
        lambda: _sent_to_all(unseen.measure(view, stage.statistics, where), everywhere) if unseen else None
    )
    release_memory()
    more = {}
    if is_first():
        more = context.shared(view.index) | (context.gradients[view.index] if context.gradients else {})
    # Shared ones after the others: there is an exchange in each.
    turns = sorted(range(len(pieces)), key=lambda n: bool(pieces[n].shared))
    mine = {n: pieces[n] for n in turns if pieces[n].shared or owners[n] == process_index()}
    made = {n: decompose(piece, view, moments | more, held_out) for n, piece in mine.items()}
    del moments
    found = held_out()  # may have been asked for already: by all processes, or by none
    if found is not None:
        with time_spent("decomposition"):
            for result in made.values():
                for module, error in result.errors.items():
                    result.reports[module]["held_out_error"] = error(found)
    # What all processes have made of the same numbers is not sent again.
    parts = (
        made[n] if piece.shared else present(sent_by(owner, made.get(n)))
        for n, (piece, owner) in enumerate(zip(pieces, owners, strict=True))
    )
    return functools.reduce(_added, parts, BlockResult())


def _owners(context: RunContext, view: BlockView, pieces: Sequence[CompressionStep]) -> list[int]:
    """Return the process that has the moments of each piece and decomposes it, or sends them to all.

    It is the first one where it alone has what the method reads.
    """
    method, turn = context.method, itertools.count()
    is_dealt = context.provider.is_measured and not method.gradients(view) and not method.shared(view)
    return [next(turn) % process_count() if is_dealt and not piece.shared else 0 for piece in pieces]


def _sent_to_all(moments: BlockMoments, names: set[str]) -> BlockMoments:
    """Return the moments with those of these names in all processes, as the first one has them."""
    if not names:
        return moments
    return moments | broadcast({name: moment for name, moment in moments.items() if name in names})


def _added(whole: BlockResult, result: BlockResult) -> BlockResult:
    """Return what is known of a block with what came of another step or piece, which changes ``whole``."""
    again = tuple(f"{path}." for path in result.modules)  # modules that may have been replaced by an earlier step
    for key in [key for key in whole.state if key.startswith(again)]:
        del whole.state[key]
    whole.modules.update(result.modules)
    whole.state.update(result.state)
    for module, report in result.reports.items():
        whole.reports.setdefault(module, {}).update(report)
    whole.basis = result.basis
    return whole


def sent_by(owner: int, result: BlockResult | None) -> BlockResult | None:
    """Return in all processes the result of one: nothing is decomposed twice, so nothing can differ."""
    return broadcast(result and dataclasses.replace(result, errors={}), owner)


def decompose(stage: CompressionStep, view: BlockView, moments, held_out=lambda: None) -> BlockResult:
    """Run one step of a method on a block.

    Raises:
        NumericsError: what comes up in the linear algebra, with the block.
    """
    with algebra(view) as view:
        return stage.decompose(view, moved(moments, view.device), held_out)


@contextlib.contextmanager
def algebra(view: BlockView) -> Iterator[BlockView]:
    """Give the block where there is fp64, for linear algebra on its weights; name the block in what is raised there.

    Raises:
        NumericsError: a matrix is singular or not finite.
    """
    try:
        # MPS has no fp64; factors go back to the device when they are installed.
        with time_spent("decomposition"):
            yield view.on_cpu() if view.device.type == "mps" else view
    except (torch.linalg.LinAlgError, ValueError) as error:
        raise NumericsError(f"{view.path}: {error}") from error
