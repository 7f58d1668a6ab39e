"""Tensors as a compressed model keeps them: plain, or quantised."""

import math
from functools import reduce

import torch
from torch import nn


class QuantizedTensor(nn.Module):
    """A tensor stored as ``low + scale * code``: one scale and one low per run of ``chunk`` numbers in row-major order.

    Codes have 2 to 8 bits and are packed for every width: a code is cut into fields of 8, 4, 2 and 1 bits (7 = 4 + 2 +
    1), and as many fields of a kind as fit share a byte. Code ``i`` of ``m`` bytes lies in byte ``i mod m``, so that
    unpacking is a few shifts of whole vectors. ``weight`` is the tensor, computed in fp32 at least and rounded to the
    dtype of the scales. LatentLLM (arXiv:2505.18413), Eq. 242.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    low: torch.Tensor

    def __init__(self, shape: tuple[int, ...], bits: int, chunk: int):
        super().__init__()
        if not 2 <= bits <= 8:
            raise ValueError(f"codes must have 2 to 8 bits, got {bits}")
        self.shape, self.bits = tuple(shape), bits
        self.numel = math.prod(self.shape)
        self.chunk = min(chunk, max(self.numel, 1))  # a longer run has no more numbers
        size = sum(-(-self.numel // (8 // width)) for width in self.fields(bits))
        self.register_buffer("codes", torch.zeros(size, dtype=torch.uint8))
        for name in ("scale", "low"):
            self.register_buffer(name, torch.zeros(-(-self.numel // self.chunk)))

    def reset_parameters(self, std: float) -> None:
        """Random numbers about 0, uniform, with this deviation."""
        reach = math.sqrt(3) * std
        self.codes.random_()
        self.low.fill_(-reach)
        self.scale.fill_(2 * reach / (2**self.bits - 1))

    @staticmethod
    def fields(bits: int) -> list[int]:
        return [width for width in (8, 4, 2, 1) if bits & width]

    @staticmethod
    def pack(codes, bits: int):
        """Bytes of ``(n,)`` uint8 codes; no more than ``bits * n / 8`` and one per field."""
        packed, shift = [], 0
        for width in QuantizedTensor.fields(bits):
            field = (codes >> shift) & (2**width - 1)
            rows = nn.functional.pad(field, (0, -len(field) % (8 // width))).view(8 // width, -1)
            places = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
            packed.append((rows << places[:, None]).sum(0).to(torch.uint8))
            shift += width
        return torch.cat(packed)

    def unpack(self):
        """Return ``(n,)`` uint8 codes."""
        parts, start, shift = [], 0, 0
        for width in self.fields(self.bits):
            stop = start - (-self.numel // (8 // width))
            places = torch.arange(0, 8, width, dtype=torch.uint8, device=self.codes.device)
            field = (self.codes[start:stop] >> places[:, None]) & (2**width - 1)
            parts.append(field.flatten()[: self.numel] << shift)
            start, shift = stop, shift + width
        return reduce(torch.bitwise_or, parts)

    @property
    def weight(self):
        work = torch.promote_types(self.scale.dtype, torch.float32)
        codes = nn.functional.pad(self.unpack(), (0, -self.numel % self.chunk)).view(len(self.scale), self.chunk)
        values = self.low.to(work)[:, None] + self.scale.to(work)[:, None] * codes
        return values.flatten()[: self.numel].view(self.shape).to(self.scale.dtype)

    def forward(self, x=None):
        """A matrix times the rows of ``x``, as ``nn.Linear``; without them the tensor."""
        return self.weight if x is None else nn.functional.linear(x, self.weight)


def check_permutation(index, name: str) -> None:
    """Raise :class:`ValueError` unless every row of ``index`` holds each of its places once."""
    places = torch.arange(index.shape[-1], device=index.device)
    if not torch.equal(index.long().sort(-1).values, places.expand(index.shape)):
        raise ValueError(
            f"{name} is no permutation of 0 to {index.shape[-1] - 1}: it is damaged, or the checkpoint lacks it"
        )


def check_range(index, size: int, name: str) -> None:
    """Raise :class:`ValueError` unless every entry of ``index`` is in ``[0, size)``."""
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
        raise ValueError(
            f"{name} has entries {int(index.min())} to {int(index.max())}, allowed are 0 to {size - 1}: it is damaged, "
            "or the checkpoint lacks it"
        )


def index_dtype(size: int) -> torch.dtype:
    """The smallest of two integer types that holds an index below ``size``."""
    return torch.int16 if size <= 2**15 else torch.int32
