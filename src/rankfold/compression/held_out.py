"""Samples kept out of the fit: what a compression does to text it has not seen.

Errors on the calibration text are training errors, and means over tokens: a module can look fine while the one token
that all later ones attend to is lost. So some windows stay out of every fit and run beside it twice, through the dense
blocks and through the compressed ones. They give every module's error there, how far the two streams drift apart block
by block, and in the end both perplexities; of an encoder, which predicts nothing, how far its last states have moved. A
run that destroys a model must not look like a success.
"""

import logging
import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._utils.processes import gather
from .._utils.stopwatch import time_spent
from ..architectures import BlockView
from ..calibration.likelihood import Comparison, compare_losses, perplexity_of, token_losses, warn_of_guessing
from ..calibration.moments import NO_OWNERS, BlockMoments
from ..calibration.providers import DenseMoments, HiddenStates
from ..calibration.runner import Stream, advance, outputs, start
from ..data.batches import Data, again, length_of
from ..data.tokens import check_fits
from ..errors import method_option
from ..models.dense_model import DenseModel
from .states import compare_states

log = logging.getLogger(__name__)

SMALL = 1.05  # ratio of perplexities that is no damage at any sparsity: a change of dtype alone may cost a fifth of it
LEAST = 1e-3  # part of the weights left by which a loss is explained: a run may remove all of them
CERTAIN = 2  # standard errors between a loss and what is explained, before a model is called damaged


def explained_ratio(sparsity: float) -> float:
    """Return the largest ratio of perplexities that a sparsity explains: ``(1 - sparsity)^-3``, and 1.05 at least.

    A rule of thumb that sound runs stay well below and broken ones leave far behind (docs/metrics.md).
    """
    return max(max(1 - sparsity, LEAST) ** -3, SMALL)


def is_damaged(found: Comparison, sparsity: float) -> bool:
    """Tell whether more is lost than the sparsity explains and than the noise of so few tokens could be."""
    if found.standard_error is None:  # of a single observation nothing is known
        return False
    return not found.difference - CERTAIN * found.standard_error <= math.log(explained_ratio(sparsity))


def perplexities(found: Comparison) -> dict[str, Any]:
    """Return what the record says of the losses of both models."""
    return {
        "perplexity_dense": perplexity_of(found.dense),
        "perplexity": perplexity_of(found.compressed),
        "ratio": perplexity_of(found.difference),
        "standard_error": found.standard_error,
    }


class HeldOut:
    """Follows one compression on samples that it is not fitted to.

    Args:
        source: the dense model.
        ids: ``(S, T)`` token ids, images, or image-text examples.
        sequential: whether blocks are fitted to what the compressed blocks before them send, or to the dense stream.
        shards: as for :func:`rankfold.calibration.runner.start`.
        inputs: of dense layers that the method compares with those of the compressed ones.
    """

    def __init__(
        self, source: DenseModel, ids: Data, *, sequential: bool, shards: int = 1, inputs: Collection[str] = ()
    ):
        self.source, self.ids, self.sequential = source, ids, sequential
        self.dense = start(source, ids, autocast=source.autocast, shards=shards)
        self.small = self.dense.copy()
        self.provider = HiddenStates(self.small, self.dense, inputs) if sequential else DenseMoments(self.dense)
        self.drift: list[float] = []  # of the compressed from the dense stream, after every block

    def enter(self, view: BlockView, *, skip: bool) -> None:
        """Go through the dense block; ``skip``: nobody will measure it."""
        self.provider.enter(view, skip=skip)

    def measure(self, view: BlockView, statistics: set[str], owners: Mapping[str, int] = NO_OWNERS) -> BlockMoments:
        """Return the moments of the block as it is now, on the held-out samples; ``owners`` as for a provider."""
        return self.provider.measure(view, statistics, owners)

    def keep_mixed(self, view: BlockView) -> None:
        """Keep what the attention of the block mixes, as a provider does."""
        self.provider.keep_mixed(view)

    def follow(self, view: BlockView) -> None:
        """Go through the compressed block in its place."""
        self.provider.follow(view)
        if not self.sequential:
            advance(view, self.small)
        self.drift.append(_drift(self.dense, self.small))

    def so_far(self) -> str:
        """Return what is known after the last block."""
        return f"error of the stream on held-out samples {self.drift[-1]:.3f}" if self.drift else ""

    @time_spent("forward")
    def finish(self, sparsity: float, *, can_exclude: bool = True) -> dict:
        """Describe what came out, with a warning where the model is damaged, which is logged too.

        Args:
            can_exclude: whether the method can leave single blocks dense, which the warning then suggests.
        """
        facts = {"windows": len(self.ids), "length": length_of(self.ids, self.source.part)}
        found, damage = (self._perplexities if self.source.architecture.decoder else self._states)(sparsity)
        facts |= found | {"stream_errors": self.drift, "warning": None}
        if damage:
            block = self._breaks_away()
            facts |= {"breaks_away_at": block}
            advice = f"Exclude it ({method_option('exclude_blocks', (block,))}), lower" if can_exclude else "Lower"
            facts["warning"] = (
                f"THE MODEL IS DAMAGED: {damage}; the stream breaks away at block {block}. {advice} the sparsity, or "
                f"calibrate on more {self._what}"
            )
            log.warning(facts["warning"])
        return facts

    def _perplexities(self, sparsity: float) -> tuple[dict, str | None]:
        """Return both perplexities, and what is wrong where the compressed one is beyond what the sparsity explains."""
        losses = (token_losses(self.source, stream.ids, stream) for stream in (self.dense, self.small))
        found, limit = compare_losses(*losses), explained_ratio(sparsity)
        text = f"the held-out calibration {self._what}"
        facts = perplexities(found) | {
            "explained_ratio": limit,
            "dense_warning": warn_of_guessing(found.dense, self.source.config.vocab_size, text),
        }
        if not is_damaged(found, sparsity):
            return facts, None
        return facts, (
            f"perplexity on held-out calibration {self._what} goes from {facts['perplexity_dense']:.1f} to "
            f"{facts['perplexity']:.1f}, more than sparsity {sparsity:.2f} explains (x {limit:.1f})"
        )

    def _states(self, sparsity: float) -> tuple[dict, str | None]:
        """Return how far the states after the last norm moved, and what is wrong where a constant would be as near."""
        batches = zip(again(self.dense.ids, self.dense.hidden), self.dense.hidden, self.small.hidden, strict=True)
        last = partial(outputs, self.source)
        pairs = ((last(ids, self.dense, a), last(ids, self.dense, b)) for ids, a, b in batches)
        found = compare_states(pairs)
        facts = {"state_error": found.error, "standard_error": found.standard_error, "cosine": found.cosine}
        if found.standard_error is None or found.error - CERTAIN * found.standard_error < 1:
            return facts, None
        return facts, (
            f"its last states on held-out {self._what} are as far from the dense model's as a constant would be "
            f"(relative error {facts['state_error']:.2f})"
        )

    @property
    def _what(self) -> str:
        if self.source.part.takes_images:
            return "images"
        return "text" if isinstance(self.ids, Tensor) else "examples"

    def _breaks_away(self) -> int:
        """Return the block in which the drift grows most."""
        before = [0.0, *self.drift[:-1]]
        return max(range(len(self.drift)), key=lambda i: self.drift[i] - before[i])


def follow_held_out(
    source: DenseModel, ids: Data | None, mode: str, shards: int = 1, inputs: Collection[str] = ()
) -> HeldOut | None:
    """Start the held-out samples of a calibration set; a small one has none, which is logged."""
    if ids is None:
        log.warning("no calibration sample is kept out of the fit, so nothing checks the result; evaluate it")
        return None
    check_fits(ids, source)
    return HeldOut(source, ids, sequential=mode == "sequential", shards=shards, inputs=inputs)


@time_spent("forward")
def nats_per_token(source: DenseModel, ids: Data, stream: Stream) -> float:
    """Return the mean loss per predicted token of a stream after the last block.

    Args:
        ids: what the stream was started from.
    """
    return torch.cat(token_losses(source, ids, stream)).double().mean().item()


def _drift(dense: Stream, small: Stream) -> float:
    """Return the RMS difference of two streams over the RMS of the first, of all processes together."""
    pairs = list(zip(dense.hidden, small.hidden, strict=True))
    gaps = [(a.float() - b.float()).square().sum().cpu() for a, b in pairs]
    squares = [a.float().square().sum().cpu() for a, _ in pairs]
    gap, whole = (torch.stack([x for own in gather(sums) for x in own]).sum() for sums in (gaps, squares))
    return (gap / whole).sqrt().item()
