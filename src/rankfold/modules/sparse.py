"""Sparse matrices: corrections of latent layers, and layers that are nothing else."""

import torch
from torch import nn

from .tensors import check_range, index_dtype


class SparseCorrection(nn.Module):
    """``D x`` for a sparse ``D`` (out, in): values, their columns, and where every row starts.

    ``embedding_bag`` is the product: row ``o`` of the output is a weighted sum of rows of ``x^T``. It costs what the
    values cost, makes no dense ``D``, works in bf16 and fp16 on CPU and GPU, and has gradients; torch's CSR product has
    no bf16 on CPU, and a scatter into a dense matrix costs more than the layer it corrects.
    """

    columns: torch.Tensor
    starts: torch.Tensor

    def __init__(self, in_features: int, out_features: int, nonzeros: int):
        super().__init__()
        if nonzeros > in_features * out_features:
            raise ValueError(f"{nonzeros} non-zeros do not fit a ({out_features}, {in_features}) layer")
        self.values = nn.Parameter(torch.empty(nonzeros))
        # Until they are loaded the values lie evenly over rows and columns.
        columns = torch.arange(in_features).repeat(-(-nonzeros // in_features))[:nonzeros]
        # Neither by `%` nor by `//`: PyTorch divides integers on the meta device in Python, up to 20 ms at a time.
        starts = torch.tensor([row * nonzeros // out_features for row in range(out_features + 1)])
        self.register_buffer("columns", columns.to(index_dtype(in_features)))
        self.register_buffer("starts", starts.int())
        self.in_features = in_features

    def check_indices(self, name: str) -> None:
        """Raise :class:`ValueError` where an index leads outside."""
        check_range(self.columns, self.in_features, f"{name}.columns")
        ends = (int(self.starts[0]), int(self.starts[-1]))
        if ends != (0, self.values.numel()) or (self.starts.diff() < 0).any():
            raise ValueError(
                f"{name}.starts do not rise from 0 to {self.values.numel()}: they are damaged, "
                "or the checkpoint lacks them"
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
        return y.T.reshape(*x.shape[:-1], len(self.starts) - 1)


class SparseLinear(nn.Module):
    """``y = D x + b``: a layer of ``nonzeros`` values, no latent (LatentLLM, arXiv:2505.18413, App. I).

    The output has the dtype that a dense layer would give, inside autocast too.
    """

    def __init__(self, spec: dict):
        super().__init__()
        self.in_features, self.out_features = spec["in"], spec["out"]
        self.sparse = SparseCorrection(self.in_features, self.out_features, spec["nonzeros"])
        self.bias = nn.Parameter(torch.empty(self.out_features)) if spec["bias"] else None

    def forward(self, x):
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = self.sparse(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)
