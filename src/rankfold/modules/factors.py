"""Factors of latent layers: what holds the numbers of ``A`` or ``B`` under the name ``weight``.

A factor that is a plain matrix is an ``nn.Linear``, so that adapters, quantisers and engines find it.
"""

import torch
from torch import nn

from .tensors import QuantizedTensor, check_permutation, index_dtype

TRIANGLE = 128  # the largest one that is copied out of a square


class Numbers(nn.Module):
    """Numbers that are no plain matrix: the free entries of a triangular factor, or one matrix per head."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self):
        """The numbers. Asked for by a call, as they may have been put away (accelerate's offloading)."""
        return self.weight


def numbers(shape: tuple[int, ...], spec: dict) -> Numbers | QuantizedTensor:
    """Numbers of any shape, quantised where the description has ``bits``."""
    return QuantizedTensor(shape, spec["bits"], spec["chunk"]) if "bits" in spec else Numbers(shape)


def matrix(shape: tuple[int, ...], spec: dict) -> nn.Linear | QuantizedTensor:
    """A plain matrix, quantised where the description has ``bits``; calling it multiplies by it."""
    rows, columns = shape
    return (
        QuantizedTensor(shape, spec["bits"], spec["chunk"]) if "bits" in spec else nn.Linear(columns, rows, bias=False)
    )


def multiply_upper(square, x):
    """``x U^T``, ``U`` what is on and above the diagonal of a square.

    Halves at a time: two triangles and a block of numbers that is multiplied where it lies. Copying out the whole
    triangle would take several times as long as the product with one token.
    """
    size = len(square)
    if size <= TRIANGLE:
        return nn.functional.linear(x, square.triu())
    half = size // 2
    first = multiply_upper(square[:half, :half], x[..., :half]) + nn.functional.linear(
        x[..., half:], square[:half, half:]
    )
    return torch.cat([first, multiply_upper(square[half:, half:], x[..., half:])], -1)


def triangle_macs(size: int) -> int:
    """Multiplications of one token by a triangle that goes through :func:`multiply_upper` or :func:`multiply_lower`."""
    half = size // 2
    return size**2 if size <= TRIANGLE else half * (size - half) + triangle_macs(half) + triangle_macs(size - half)


def multiply_lower(square, x):
    """``x L^T``, ``L`` what is below the diagonal of a square, and ones on it."""
    size = len(square)
    if size <= TRIANGLE:
        return x + nn.functional.linear(x, square.tril(-1))
    half = size // 2
    last = multiply_lower(square[half:, half:], x[..., half:]) + nn.functional.linear(
        x[..., :half], square[half:, :half]
    )
    return torch.cat([multiply_lower(square[:half, :half], x[..., :half]), last], -1)


class HeadIdentity(nn.Module):
    """``B`` (heads * h, rank) whose heads are ``[I | rest]`` up to an order of their own (LatentLLM Eq. 79-80).

    The identities are not stored.
    """

    order: torch.Tensor

    def __init__(self, heads: int, head_dim: int, rank: int, spec: dict):
        super().__init__()
        if rank < head_dim:
            raise ValueError(f"a per-head identity needs rank >= {head_dim} (the head dimension), got {rank}")
        self.rest = numbers((heads, head_dim, rank - head_dim), spec)
        self.register_buffer("order", torch.arange(rank, dtype=index_dtype(rank)).repeat(heads, 1))

    def check_indices(self, name: str) -> None:
        """Raise :class:`ValueError` where the order of a head is none."""
        check_permutation(self.order, f"{name}.order")

    @property
    def weight(self):
        rest = self.rest()
        identity = torch.eye(rest.shape[1], dtype=rest.dtype, device=rest.device).expand(len(rest), -1, -1)
        back = torch.argsort(self.order.long(), -1)[:, None].expand(-1, rest.shape[1], -1)
        return torch.cat([identity, rest], -1).gather(2, back).flatten(0, 1)

    def forward(self, x=None):
        """``B`` times the rows of ``x``; without them the matrix."""
        return self.weight if x is None else nn.functional.linear(x, self.weight)


def matrix_of(factor, columns: int, like):
    """``(rows, columns)`` that a factor multiplies by; where it has to be computed, of dtype and device of ``like``.

    A layer that adapters, a quantiser or an engine put in place of an ``nn.Linear`` may compute something else than its
    ``weight`` says, so it is run on the identity.
    """
    if type(factor) in (QuantizedTensor, HeadIdentity):
        return factor()  # by a call, as its buffers may have been put away (accelerate's offloading)
    if type(factor) is nn.Linear and type(factor.weight) is nn.Parameter and not factor.weight.is_meta:
        return factor.weight  # and not a quantiser's, nor put away (accelerate's offloading)
    return factor(torch.eye(columns, dtype=like.dtype, device=like.device)).T
