"""What stands around a text that an encoder reads: windows are whole texts to it, from its first special token to its last.

Shape legend: S windows, T tokens of one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Frame", "frame_of"]

WORD = "a"


class Frame(NamedTuple):
    """Token ids in front of a text and behind it."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.before) + len(self.behind)

    def around(self, windows: Tensor) -> Tensor:
        """``(S, T + tokens)`` out of ``(S, T)``."""
        sides = [torch.tensor(ids, dtype=windows.dtype).expand(len(windows), -1) for ids in (self.before, self.behind)]
        return torch.cat([sides[0], windows, sides[1]], dim=1)


def frame_of(source) -> Frame:
    """Of the tokenizer of an encoder; nothing for a decoder, whose windows begin anywhere in a text."""
    if source.architecture.decoder:
        return Frame()
    inside = source.tokenizer(WORD, add_special_tokens=False).input_ids
    whole = source.tokenizer(WORD).input_ids
    begin = next((i for i in range(len(whole)) if whole[i : i + len(inside)] == inside), len(whole))
    return Frame(tuple(whole[:begin]), tuple(whole[begin + len(inside) :]))
