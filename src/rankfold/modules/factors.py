"""Factors of latent layers that are not a plain matrix."""

import torch
from torch import nn

from .tensors import check_permutation, index_dtype, new_tensor, value_of

__all__ = ["HeadIdentity"]


class HeadIdentity(nn.Module):
    """``B`` (heads * h, rank) whose heads are ``[I | rest]`` up to an order of their own (LatentLLM Eq. 79-80).

    The identities are not stored. Calling the module gives the matrix.
    """

    def __init__(self, heads: int, head_dim: int, rank: int, spec: dict):
        super().__init__()
        if rank < head_dim:
            raise ValueError(f"a per-head identity needs rank >= {head_dim} (the head dimension), got {rank}")
        self.rest = new_tensor((heads, head_dim, rank - head_dim), spec)
        self.register_buffer("order", torch.zeros(heads, rank, dtype=index_dtype(rank)))

    def check_indices(self, name: str) -> None:
        """Raise :class:`ValueError` where the order of a head is none."""
        check_permutation(self.order, f"{name}.order")

    def forward(self):
        rest = value_of(self.rest)
        identity = torch.eye(rest.shape[1], dtype=rest.dtype, device=rest.device).expand(len(rest), -1, -1)
        back = torch.argsort(self.order.long(), -1)[:, None].expand(-1, rest.shape[1], -1)
        return torch.cat([identity, rest], -1).gather(2, back).flatten(0, 1)
