"""How likely a text is to a model: token by token, to two models on the same tokens, and beside guessing.

Shape legend: B windows of a batch, T tokens, V vocabulary, n predicted tokens of a window.
"""

import logging
import math
from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._utils.processes import gather
from ..data.batches import Data, again
from .runner import IGNORED, Stream, predictions

log = logging.getLogger(__name__)

POSITIONS = 256  # of all windows of a batch together, whose logits are held at once: a vocabulary is large
FEW = 4  # windows; with fewer, pieces of windows are the observations of a standard error
PIECE = 16  # predicted tokens of such a piece: losses of tokens this far apart hardly depend on each other


class Comparison(NamedTuple):
    """Two models on the same tokens."""

    dense: float  # nats per predicted token
    compressed: float
    difference: float  # compressed minus dense
    standard_error: float | None  # of the difference; None for a single observation
    tokens: int  # predicted ones


def token_losses(source, ids: Data, stream: Stream) -> list[Tensor]:
    """Return the negative log-likelihoods ``(n,)`` of the predicted tokens of every window, on the CPU.

    Args:
        source: an open model, whose norm and head make the predictions.
        ids: what the stream was started from, as far as it is this process's; placeholders of images are not predicted.
        stream: behind the last block. Where several processes share it, each gets the losses of all windows.
    """
    found: list[Tensor] = []
    for some_ids, hidden in zip(again(ids, stream.hidden), stream.hidden, strict=True):
        losses, told, positions = [], [], max(1, POSITIONS // len(hidden))
        for logits, targets in predictions(source, some_ids, stream, hidden, positions=positions):
            flat = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
            losses.append(flat.view(targets.shape).cpu())
            told.append((targets != IGNORED).cpu())
        found += [row[mask] for row, mask in zip(torch.cat(losses, 1), torch.cat(told, 1), strict=True)]
    return [row for rows in gather(found) for row in rows] if stream.is_shared else found


def losses_memory(source, tokens: int) -> int:
    """Return the bytes of logits, and of their softmax, that :func:`token_losses` holds at once.

    Args:
        tokens: of a batch.
    """
    return 2 * 4 * min(POSITIONS, tokens) * source.config.vocab_size if source.architecture.decoder else 0


def compare_losses(dense: Sequence[Tensor], compressed: Sequence[Tensor]) -> Comparison:
    """Compare two models by their losses on the same tokens.

    The difference of two means is known far better than either mean, because a hard token is hard for both models: its
    standard error is that of paired differences, ``sqrt(k / (k - 1) * sum_j e_j^2) / N`` with
    ``e_j = sum_(i in j) (d_i - d)`` over ``k`` observations ``j`` of ``N`` tokens together. An observation is a window;
    where there are few windows, a piece of one.

    Args:
        dense: of every window ``(n,)`` nats; windows may differ in length, and one of them has a token at least.
        compressed: the same tokens in the same order.
    """
    gaps = [small.double() - large.double() for large, small in zip(dense, compressed, strict=True)]
    pieces = gaps if len(gaps) >= FEW else [piece for gap in gaps for piece in gap.split(PIECE)]
    tokens = sum(len(gap) for gap in gaps)
    large, small = (torch.cat(list(losses)).double().mean().item() for losses in (dense, compressed))
    difference = (reduce(add, (piece.sum() for piece in pieces)) / tokens).item()
    count, spread = len(pieces), reduce(add, ((piece - difference).sum().square() for piece in pieces))
    error = (count / (count - 1) * spread).sqrt().item() / tokens if count > 1 else None
    return Comparison(large, small, difference, error, tokens)


def guesses(nats: float, vocabulary: int) -> bool:
    """Tell whether a loss per token is that of guessing: a perplexity over half the vocabulary, or not a number."""
    return not nats <= math.log(vocabulary / 2)


def warn_of_guessing(nats: float, vocabulary: int, text: str) -> str | None:
    """Log and return a warning where a model predicts a text no better than guessing does.

    Model, tokenizer and text belong together only if the model predicts the text. A random model does not, and may
    still be what the caller wants, so nothing is refused.

    Args:
        nats: loss per token.
        vocabulary: tokens there are to guess among.
        text: which one, for the message.
    """
    if not guesses(nats, vocabulary):
        return None
    warning = (
        f"the model predicts {text} no better than guessing: perplexity {perplexity_of(nats):,.0f} with {vocabulary:,} "
        "tokens to choose from; check the encoding of the text, the tokenizer and the weights: "
        "they may not belong together"
    )
    log.warning(warning)
    return warning


def perplexity_of(nats: float) -> float:
    """Return ``exp(nats)``, and the largest float where that is beyond it: JSON has no infinity."""
    return math.exp(min(nats, 700.0))
