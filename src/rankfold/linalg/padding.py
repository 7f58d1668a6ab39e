"""Narrow heads in wide ones: zeros where a stock layer wants more rows or columns than are left.

Shape legend: H heads, R width of a narrow head, P = R / 2 rotary pairs, N width of a wide head, D width of the other
side.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def head_places(pairs: Tensor, rotary_dim: int) -> Tensor:
    """``(H, R)`` places that the dimensions of a narrow head take in a wide one.

    Rotary embedding turns dimension ``p`` of a narrow head together with ``p + P``, and in Hugging Face's half layout
    place ``f`` of a wide head with ``f + rotary_dim / 2`` by frequency ``f``. So a pair goes to the places of its
    frequency, and one that does not turn to the next two places after ``rotary_dim``. Scores of queries and keys
    scattered so are those of the narrow heads.

    Args:
        pairs: ``(H, P)`` frequency of each pair, in ``[0, rotary_dim / 2]``; the last one stands for "does not turn".
            No head has a frequency twice.
        rotary_dim: leading places of a wide head that turn.

    Raises:
        ValueError: a frequency out of range, or twice in a head.
    """
    half, pairs = rotary_dim // 2, pairs.long()
    if pairs.numel() and not 0 <= int(pairs.min()) <= int(pairs.max()) <= half:
        raise ValueError(f"frequencies must be in 0 to {half}, got {int(pairs.min())} to {int(pairs.max())}")
    still = pairs == half
    after = rotary_dim + 2 * (still.cumsum(1) - 1)  # (H, P)
    first, second = torch.where(still, after, pairs), torch.where(still, after + 1, pairs + half)
    places = torch.cat([first, second], 1)
    if (places.sort(1).values.diff(dim=1) == 0).any():
        raise ValueError("a head has a frequency twice, and a wide head has one place for it")
    return places


def scatter_heads(x: Tensor, places: Tensor, width: int) -> Tensor:
    """``(H N, ...)`` rows of wide heads: dimension ``i`` of narrow head ``h`` at place ``places[h, i]``, zeros
    elsewhere.

    Args:
        x: ``(H R, ...)``.  places: ``(H, R)``.  width: N, larger than all places.
    """
    heads = len(places)
    wide = x.new_zeros(heads * width, *x.shape[1:])
    wide[(places + width * torch.arange(heads, device=places.device)[:, None]).flatten()] = x
    return wide


def pad_units(x: Tensor, count: int, dim: int = 0) -> Tensor:
    """``x`` with zeros after its entries along ``dim``, ``count`` entries in all."""
    zeros = [0, 0] * (x.dim() - 1 - dim)
    return pad(x, [*zeros, 0, count - x.shape[dim]])
