"""What stands around a window of text. To an encoder it is a whole text, from its first special token to its last; a
decoder, which may begin anywhere in a text, has nothing around it, unless it is lost without its start token.

Shape legend: S windows, T tokens of one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..architectures import Architecture

WORD = "a"


class Frame(NamedTuple):
    """Token ids before a text and after it."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.before) + len(self.after)

    @property
    def inside(self) -> dict:
        """Options of a tokenizer for text that stands in such frames."""
        return {"add_special_tokens": False} if self.tokens else {}

    def around(self, windows: Tensor) -> Tensor:
        """``(S, T + tokens)`` out of ``(S, T)``."""
        sides = [torch.tensor(ids, dtype=windows.dtype).expand(len(windows), -1) for ids in (self.before, self.after)]
        return torch.cat([sides[0], windows, sides[1]], dim=1)


def frame_of(family: Architecture | None, tokenizer) -> Frame:
    """What a family of models (``None``: one that is not known) needs, of the ids that its tokenizer has for it."""
    if family is None or family.decoder:
        start = tokenizer.bos_token_id if family is not None and family.needs_start else None
        return Frame() if start is None else Frame((start,))
    inside = tokenizer(WORD, add_special_tokens=False).input_ids
    whole = tokenizer(WORD).input_ids
    begin = next((i for i in range(len(whole)) if whole[i : i + len(inside)] == inside), len(whole))
    return Frame(tuple(whole[:begin]), tuple(whole[begin + len(inside) :]))
