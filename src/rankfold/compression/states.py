"""How far the last states of an encoder have moved, and how well so few samples tell."""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._utils.processes import gather
from ..calibration.likelihood import FEW, PIECE
from ..calibration.moments import wide


@dataclass(frozen=True)
class StateComparison:
    """What became of the states of some tokens."""

    error: float  # sqrt(sum |a - b|^2 / sum |a - mean a|^2); a constant as near as the mean has 1
    standard_error: float | None  # of the error; None where there is a single observation
    cosine: float  # mean over tokens


def compare_states(pairs: Iterable[tuple[Tensor, Tensor]]) -> StateComparison:
    """Compare two models by their states of the same tokens.

    The standard error is that of a ratio of two sums over ``k`` observations, ``R = sum_j a_j / sum_j v_j``, with the
    residuals ``e_j = a_j - R v_j``: ``sqrt(k / (k - 1) * sum_j e_j^2) / sum_j v_j``, and for its root divided by
    ``2 sqrt(R)``. An observation is a sample; where there are few, a piece of one, as in
    :func:`~rankfold.calibration.likelihood.compare_losses`.

    Args:
        pairs: batches of states of the dense and of the compressed model, both ``(S, T, D)``; of samples that several
            processes share, those of this process.
    """
    own = [_sums(large, small) for dense, compressed in pairs for large, small in zip(dense, compressed, strict=True)]
    rows = [row for rows in gather(own) for row in rows]
    if len(rows) >= FEW:
        rows = [{name: value.sum(0, keepdim=True) for name, value in row.items()} for row in rows]
    apart, energy, total, tokens, alike = (torch.cat([row[name] for row in rows]) for name in rows[0])
    mean = total.sum(0) / tokens.sum()
    varies = energy - 2 * total @ mean + tokens * mean.square().sum()
    ratio = (apart.sum() / varies.sum().clamp_min(sys.float_info.min)).item()
    error, count, standard_error = math.sqrt(ratio), len(apart), None
    if count > 1 and error > 0:
        spread = (apart - ratio * varies).square().sum() * count / (count - 1)
        standard_error = (spread.sqrt() / varies.sum()).item() / (2 * error)
    return StateComparison(error, standard_error, (alike.sum() / tokens.sum()).item())


def _sums(dense: Tensor, compressed: Tensor) -> dict[str, Tensor]:
    """Return sums over pieces of 16 tokens of ``(T, D)`` states, on the CPU."""
    a, b = wide(dense), wide(compressed)
    of_tokens = {
        "apart": (a - b).square().sum(-1),
        "energy": a.square().sum(-1),
        "total": a,
        "tokens": torch.ones_like(a[:, 0]),
        "alike": nn.functional.cosine_similarity(a, b, dim=-1),
    }
    return {name: torch.stack([piece.sum(0) for piece in x.split(PIECE)]).cpu() for name, x in of_tokens.items()}
