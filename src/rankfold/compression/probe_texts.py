"""Probe texts: what a compression does to skills that the calibration text does not show.

Held-out windows are of the calibration text, so they say nothing of other kinds of text. Short passages of several
kinds (:mod:`rankfold.data.probes`) run through the dense and through the compressed blocks as well, one block at a
time, and the likelihoods of every kind are compared.
"""

import logging
from collections.abc import Sequence

from torch import Tensor

from .._utils.stopwatch import PROBES, time_spent
from ..architectures import BlockView
from ..calibration.likelihood import Comparison, compare_losses, guesses, token_losses
from ..calibration.runner import advance, start
from ..data.batches import digest_of
from ..data.probes import KINDS, Probes, load_probes
from ..errors import CheckpointError, DataError, option
from ..models.dense_model import DenseModel
from .held_out import explained_ratio, is_damaged, perplexities

log = logging.getLogger(__name__)


class ProbeTexts:
    """Follow one compression on the probe texts.

    Args:
        source: the dense model.
        probes: the passages as it reads them.
        shards: as for :func:`rankfold.calibration.runner.start`.
    """

    def __init__(self, source: DenseModel, probes: Probes, shards: int = 1):
        self.source, self.probes = source, probes
        self.dense = start(source, probes.ids, autocast=source.autocast, shards=shards)
        self.small = self.dense.copy()

    @time_spent(PROBES)
    def enter(self, view: BlockView, *, skip: bool) -> None:
        """Go through the dense block, also where it is not measured again."""
        advance(view, self.dense)

    @time_spent(PROBES)
    def follow(self, view: BlockView) -> None:
        """Go through the compressed block in its place."""
        advance(view, self.small)

    @time_spent(PROBES)
    def finish(self, sparsity: float) -> dict:
        """Return :func:`describe_probe_texts` of what came out."""
        dense, small = (self._losses(stream) for stream in (self.dense, self.small))
        return describe_probe_texts(self.probes, dense, small, sparsity, self.source.config.vocab_size)

    def _losses(self, stream) -> list[Tensor]:
        return token_losses(self.source, stream.ids, stream)


def describe_probe_texts(
    probes: Probes, dense: Sequence[Tensor], compressed: Sequence[Tensor], sparsity: float, vocabulary: int
) -> dict:
    """Return the likelihoods of every kind, and a warning that names the kinds which are damaged; that is logged too.

    Args:
        dense, compressed: of every passage, nats of its predicted tokens; those after its end are left out here.
        sparsity: of the compression.
        vocabulary: tokens there are to guess among.
    """
    kinds = {}
    for kind in KINDS:
        mine = [i for i, other in enumerate(probes.kinds) if other == kind]
        found = compare_losses(*([losses[i][: probes.lengths[i] - 1] for i in mine] for losses in (dense, compressed)))
        kinds[kind] = {"passages": len(mine)} | _facts(found, sparsity, vocabulary)
    warning = _warning(kinds, sparsity)
    if warning:
        log.warning(warning)
    return {
        "kinds": kinds,
        "explained_ratio": explained_ratio(sparsity),
        "dialogue": probes.dialogue,
        "sha256": digest_of(probes.ids),
        "warning": warning,
    }


class NoProbeTexts:
    """Where no probe text can be read: says why, or nothing where there is no likelihood."""

    def __init__(self, reason: str | None):
        self.reason = reason

    def enter(self, view, *, skip: bool) -> None:
        pass

    def follow(self, view) -> None:
        pass

    def finish(self, sparsity: float) -> dict | None:
        if self.reason is None:
            return None
        log.info("no probe texts are measured: %s", self.reason)
        return {"skipped": self.reason}


@time_spent(PROBES)
def follow_probe_texts(source: DenseModel, shards: int = 1) -> ProbeTexts | NoProbeTexts:
    """Start the probe texts of a model."""
    probes = read_probes(source)
    return probes if isinstance(probes, NoProbeTexts) else ProbeTexts(source, probes, shards)


def read_probes(source: DenseModel) -> Probes | NoProbeTexts:
    """Return the probe texts as a model reads them; none for encoders, or without a tokenizer that reads them."""
    if not source.architecture.decoder:
        return NoProbeTexts(None)
    if not source.processors.has_tokenizer:
        return NoProbeTexts("the model came without a tokenizer")
    try:
        return load_probes(source)
    except (CheckpointError, DataError) as error:  # token ids may have been given, so that nobody needs the tokenizer
        return NoProbeTexts(str(error))


def _facts(found: Comparison, sparsity: float, vocabulary: int) -> dict:
    """Return the facts of one kind of text. What the dense model guesses cannot be lost."""
    is_known = not guesses(found.dense, vocabulary)
    is_lost = is_known and is_damaged(found, sparsity)
    return {"tokens": found.tokens} | perplexities(found) | {"is_known": is_known, "is_damaged": is_lost}


def _warning(kinds: dict[str, dict], sparsity: float) -> str | None:
    """Say which kinds are damaged, and what to do."""
    damaged = [kind for kind, facts in kinds.items() if facts["is_damaged"]]
    if not damaged:
        return None
    listed = ", ".join(
        f"{kind} x {facts['ratio']:.1f} (perplexity {facts['perplexity_dense']:.1f} -> {facts['perplexity']:.1f})"
        for kind, facts in ((kind, kinds[kind]) for kind in damaged)
    )
    advice = f"add some to {option('calibration')}, such as a share of 0.3 of {_joined(damaged)}, or lower the sparsity"
    if all(facts["is_damaged"] for facts in kinds.values() if facts["is_known"]):
        advice = "lower the sparsity"
    limit = explained_ratio(sparsity)
    return f"SKILLS ARE LOST: {listed}, more than sparsity {sparsity:.2f} explains (x {limit:.1f}); {advice}"


def _joined(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
