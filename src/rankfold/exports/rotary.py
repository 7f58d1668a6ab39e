"""Heads that turn by some of the dense model's frequencies only, in a stock model: LongRoPE gives every pair its own.

Shape legend: N dense head width, R width of the heads here.
"""

import torch
from torch import Tensor

from ..models.gguf_config import longrope


def places_of(pairs: list[int], width: int) -> Tensor:
    """``(N,)`` where each place of a dense head is in a head that has only these pairs; N: nowhere.

    Args:
        pairs: ``R / 2`` frequencies, ascending, in ``[0, N / 2)``.
        width: N; all of a dense head turns.
    """
    places = torch.full((width,), width)
    places[torch.tensor([*pairs, *(pair + width // 2 for pair in pairs)])] = torch.arange(2 * len(pairs))
    return places


def turning_by(frequencies: Tensor, text) -> dict:
    """Rotary parameters of a config with which a head of R dimensions turns by these frequencies, at any length of
    text.

    Args:
        frequencies: ``(R / 2,)`` angle per position of each pair, > 0.
        text: the config, with the dense rotary parameters.
    """
    found, count = text.rope_parameters, len(frequencies)
    plain = found["rope_theta"] ** -(torch.arange(count, dtype=torch.float64) / count)
    kept = {name: found[name] for name in ("rope_theta", "partial_rotary_factor") if name in found}
    return kept | longrope(plain / frequencies.double(), text)
