"""Which blocks a model does best without, found one after another: SLEB (arXiv:2402.09025).

Every block that is still there is left out once, what the blocks after it make of that is carried to the end, and the
block without which the text is predicted best goes for good. Then the same on the model that is left. All candidates of
a round are tried side by side: only one block is resident at a time, and beside the stream of what is left run as many
others as blocks have been left out so far.
"""

import logging
from collections.abc import Callable, Collection

import torch

from .._utils.memory import release_memory
from .._utils.processes import gather, process_count, process_index
from .._utils.progress import track
from ..allocation import RankCosts
from ..calibration.runner import Stream, advance, start
from ..data.batches import Data
from ..methods import BLOCK
from ..models.block_reader import BlockReader
from ..models.dense_model import DenseModel
from .held_out import nats_per_token

log = logging.getLogger(__name__)


def greedy_block_removal(
    source: DenseModel,
    ids: Data,
    sizes: dict[int, int],
    remove: int,
    known: RankCosts,
    keep: Callable[[RankCosts], None],
) -> RankCosts:
    """Find which blocks are removed, and in which order.

    Args:
        source: an open model.
        ids: calibration samples, or examples.
        sizes: what every block that may go takes of the budget.
        remove: how much must go.
        known: what an earlier run found before it was stopped; may be empty.
        keep: called with all that is found whenever a block is.

    Returns:
        ``(block, "block")`` -> ``{0: place in the order, 1: 0.0}``; blocks that stay have no rank 0.

    Cost: for every block removed about half a forward over the windows, and the head once, for every block that is
    left; memory for as many residual streams as there are blocks.
    """
    gone = sorted((block for block, _ in known if 0 in known[block, BLOCK]), key=lambda b: known[b, BLOCK][0])
    while sum(sizes[block] for block in gone) < remove:
        losses = losses_without(source, ids, gone, sizes.keys() - set(gone))
        best = min(losses, key=lambda block: (losses[block], block))
        gone.append(best)
        log.info("block %d goes as number %d: %.4f nats per token without it", best, len(gone), losses[best])
        keep(_order(gone, sizes))
    return _order(gone, sizes)


def _order(gone: list[int], sizes: dict[int, int]) -> RankCosts:
    places = {block: {0: float(place)} for place, block in enumerate(gone, 1)}
    return {(block, BLOCK): {1: 0.0} | places.get(block, {}) for block in sizes}


@torch.no_grad()
def losses_without(
    source: DenseModel, ids: Data, gone: Collection[int], candidates: Collection[int]
) -> dict[int, float]:
    """Return candidate -> nats per predicted token when it is left out, too; processes share the candidates.

    Args:
        gone: blocks that are left out already.
        candidates: blocks to leave out one at a time; none of ``gone``.
    """
    mine = sorted(candidates)[process_index() :: process_count()]
    stream = start(source, ids, autocast=source.autocast, offload=source.offload)
    read, tried = BlockReader(source), dict[int, Stream]()  # what is left out, and what the others make of that
    for index in track(range(len(source)), f"looking for block {len(gone) + 1} to remove"):
        if index in gone:
            continue
        passed = {index: stream.copy()} if index in mine else {}
        view = read(index)
        for one in (stream, *tried.values()):
            advance(view, one)
        tried |= passed
        del view
        release_memory()
    losses = {index: nats_per_token(source, ids, one) for index, one in tried.items()}
    return {index: loss for found in gather(losses) for index, loss in found.items()}
