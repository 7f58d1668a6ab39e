"""Parts of latent layers that are not a plain matrix: sparse corrections, and factors with identities."""

import torch
from torch import nn

from .tensors import check_permutation, check_range, index_dtype, new_tensor, value_of

__all__ = ["HeadIdentity", "SparseCorrection"]


class SparseCorrection(nn.Module):
    """``D x`` for a sparse ``D`` (out, in): values, their columns, and where every row starts.

    ``embedding_bag`` is the product: row ``o`` of the output is a weighted sum of rows of ``x^T``. It costs what the
    values cost, makes no dense ``D``, works in bf16 and fp16 on CPU and GPU, and has gradients; torch's CSR product has
    no bf16 on CPU, and a scatter into a dense matrix costs more than the layer it corrects.
    """

    def __init__(self, in_features: int, out_features: int, nonzeros: int):
        super().__init__()
        if nonzeros > in_features * out_features:
            raise ValueError(f"{nonzeros} non-zeros do not fit a ({out_features}, {in_features}) layer")
        self.values = nn.Parameter(torch.empty(nonzeros))
        self.register_buffer("columns", torch.zeros(nonzeros, dtype=index_dtype(in_features)))
        self.register_buffer("starts", torch.zeros(out_features + 1, dtype=torch.int32))
        self.in_features = in_features

    def check_indices(self, name: str) -> None:
        """Raise :class:`ValueError` where an index leads outside."""
        check_range(self.columns, self.in_features, f"{name}.columns")
        ends = (int(self.starts[0]), int(self.starts[-1]))
        if ends != (0, self.values.numel()) or (self.starts.diff() < 0).any():
            raise ValueError(
                f"{name}.starts do not rise from 0 to {self.values.numel()}: they are damaged, or the checkpoint lacks them"
            )

    def forward(self, x):
        table = x.reshape(-1, x.shape[-1]).T.contiguous()  # (in, tokens)
        y = nn.functional.embedding_bag(
            self.columns.int(),
            table,
            self.starts,
            mode="sum",
            per_sample_weights=self.values.to(x.dtype),
            include_last_offset=True,
        )
        return y.T.reshape(*x.shape[:-1], -1)


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
