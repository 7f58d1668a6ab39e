"""Linear layers through a latent."""

import torch
from torch import nn

from .factors import HeadIdentity, matrix, matrix_of, multiply_lower, multiply_upper, numbers
from .sparse import SparseCorrection
from .tensors import check_permutation


def put_back(y, rows):
    """Put entry ``j`` of the last dimension into place ``rows[j]``."""
    return y.index_copy(-1, rows.long(), y)


class LatentLinear(nn.Module):
    """``y = B (A x) + b`` through a latent of width ``rank``; the junction decides what of ``A`` and ``B`` is stored.

    * ``plain``: ``A`` (rank, in) and ``B`` (out, rank).
    * ``block_identity_right``: ``A = [I | A_2]`` after a permutation of the inputs; the identity is neither stored nor
      multiplied: ``z = x[p_1] + A_2 x[p_2]``. Stores ``rank * (out + in - rank)`` numbers, fewer than ``out * in``.
    * ``block_identity_left``: the mirror, ``y[q_1] = z``, ``y[q_2] = B_2 z``.
    * ``triangles``: ``B`` unit lower, ``A`` upper trapezoidal. Their triangles share a square ``T`` (rank, rank), as in
      LAPACK's LU; ``A`` and ``B`` are the rest. Stores ``rank * (out + in - rank)`` numbers too.
    * ``lu``: the same, both trapezoids packed row by row: where they are quantised, and in earlier checkpoints. They
      are unpacked in every call.

    ``A`` and ``B`` are layers of their own, each an ``nn.Linear`` of what is stored but for ``lu``, a per-head identity
    and quantised numbers (see :mod:`.factors`). What is stored of them may be quantised (``bits``, ``chunk``), ``B``
    may have an identity in every head (``head_identity`` heads), and ``nonzeros`` adds a sparse correction:
    ``y = B (A x) + D x + b``.

    A layer with a ``basis`` has the ``A`` of the layer at that path, in an earlier block; it is stored there only.

    LatentLLM (arXiv:2505.18413), Sec. 3.3 and App. A.2, I.
    """

    def __init__(self, spec: dict):
        super().__init__()
        self.basis: str | None = spec.get("basis")
        self.in_features, self.out_features, self.rank = spec["in"], spec["out"], spec["rank"]
        self.form = spec["form"]
        if self.form not in ("plain", "block_identity_right", "block_identity_left", "triangles", "lu"):
            raise ValueError(f"unknown form {self.form!r} of a latent linear layer")
        if self.rank > min(self.in_features, self.out_features):
            raise ValueError(f"rank {self.rank} of a ({self.out_features}, {self.in_features}) layer is too large")
        A, B = self.shapes(spec)
        if self.form == "lu":
            self.A, self.B = numbers(A, spec), numbers(B, spec)
        elif heads := spec.get("head_identity"):
            self.A, self.B = matrix(A, spec), HeadIdentity(heads, self.out_features // heads, self.rank, spec)
        else:
            self.A, self.B = matrix(A, spec), matrix(B, spec)
        if self.form == "triangles":
            self.T = numbers((self.rank, self.rank), spec)
        count = spec.get("nonzeros")
        self.sparse = SparseCorrection(self.in_features, self.out_features, count) if count else None
        self.bias = nn.Parameter(torch.empty(self.out_features)) if spec["bias"] else None
        if self.form in ("block_identity_right", "triangles", "lu"):
            self.register_buffer("columns", torch.arange(self.in_features, dtype=torch.int32))
        if self.form in ("block_identity_left", "triangles", "lu"):
            self.register_buffer("rows", torch.arange(self.out_features, dtype=torch.int32))

    def check_indices(self, name: str) -> None:
        """Raise :class:`ValueError` where a permutation is none."""
        for key in ("columns", "rows"):
            if hasattr(self, key):
                check_permutation(getattr(self, key), f"{name}.{key}")

    @staticmethod
    def shapes(spec: dict) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the stored ``A`` and ``B``."""
        wide, tall, rank = spec["in"], spec["out"], spec["rank"]
        if spec["form"] == "lu":
            return (rank * wide - rank * (rank - 1) // 2,), (rank * tall - rank * (rank + 1) // 2,)
        A = (rank, wide - rank) if spec["form"] in ("block_identity_right", "triangles") else (rank, wide)
        B = (tall - rank, rank) if spec["form"] in ("block_identity_left", "triangles") else (tall, rank)
        return A, B

    def forward(self, x, part: str | None = None):
        """All of it, or a part that attention on latents needs alone.

        These go through here because what puts weights away (accelerate's offloading) brings back those of a module
        that is called.
        """
        if part is not None:
            return {"down": self._down, "up": self._up, "shift": self._shift}[part](x)
        y = self._up(self._down(x))
        return y if self.sparse is None else y + self.sparse(x).to(y.dtype)

    def down(self, x):
        """``(..., in) -> (..., rank)``."""
        return self(x, "down")

    def up(self, z):
        """``(..., rank) -> (..., out)``."""
        return self(z, "up")

    def shift(self):
        """The bias, ``(out,)``, or ``None``."""
        return self(None, "shift")

    def _shift(self, _):
        return self.bias

    def _down(self, x):
        if self.form in ("plain", "block_identity_left"):
            return self.A(x)
        x = x.index_select(-1, self.columns)
        if self.form == "lu":
            return nn.functional.linear(x, self._upper())
        fixed, rest = x[..., : self.rank], x[..., self.rank :]
        return (multiply_upper(self.T(), fixed) if self.form == "triangles" else fixed) + self.A(rest)

    def _up(self, z):
        y = self._expanded(z)
        return y if self.bias is None else y + self.bias.to(y.dtype)  # under autocast biases stay fp32

    def _expanded(self, z):
        if self.form in ("plain", "block_identity_right"):
            return self.B(z)
        if self.form == "lu":
            return put_back(nn.functional.linear(z, self._lower()), self.rows)
        return put_back(
            torch.cat([multiply_lower(self.T(), z) if self.form == "triangles" else z, self.B(z)], -1), self.rows
        )

    def up_matrix(self, like):
        """Dense ``(out, rank)`` of :meth:`up` without the bias; see :func:`~.factors.matrix_of` about ``like``."""
        if self.form in ("plain", "block_identity_right"):
            return matrix_of(self.B, self.rank, like)
        return self._expanded(torch.eye(self.rank, dtype=like.dtype, device=like.device)).T

    def _upper(self):
        A = self.A()
        free = torch.ones(self.rank, self.in_features, dtype=torch.bool, device=A.device).triu()
        return torch.zeros_like(free, dtype=A.dtype).masked_scatter(free, A)

    def _lower(self):
        B = self.B()
        free = torch.ones(self.out_features, self.rank, dtype=torch.bool, device=B.device).tril(-1)
        return torch.eye(*free.shape, dtype=B.dtype, device=B.device).masked_scatter(free, B)


class SplitHeadLinear(nn.Module):
    """``y_i = B_i (A_i x) + b_i``: a low rank of its own for every head of the output (LatentLLM App. D).

    ``plain``: ``A`` (heads * rank, in), ``B`` (heads, h, rank). ``block_identity_left``: every ``B_i`` has an identity
    after a permutation of the head's outputs, which is neither stored nor multiplied.
    """

    def __init__(self, spec: dict):
        super().__init__()
        self.heads, self.rank, self.form = spec["heads"], spec["rank"], spec["form"]
        if self.form not in ("plain", "block_identity_left"):
            raise ValueError(f"unknown form {self.form!r} of a split-head layer")
        head_dim, fixed = spec["out"] // self.heads, self.rank if self.form == "block_identity_left" else 0
        if self.rank > min(head_dim, spec["in"]):
            raise ValueError(f"rank {self.rank} of heads ({head_dim}, {spec['in']}) is too large")
        self.A = matrix((self.heads * self.rank, spec["in"]), spec)
        self.B = numbers((self.heads, head_dim - fixed, self.rank), spec)
        self.bias = nn.Parameter(torch.empty(spec["out"])) if spec["bias"] else None
        if fixed:
            self.register_buffer("rows", torch.arange(spec["out"], dtype=torch.int32))

    def check_indices(self, name: str) -> None:
        """Raise :class:`ValueError` where a permutation is none."""
        if self.form == "block_identity_left":
            check_permutation(self.rows, f"{name}.rows")

    def forward(self, x):
        z = self.A(x).unflatten(-1, (self.heads, self.rank))
        y = torch.einsum("...hr,hor->...ho", z, self.B())  # (..., heads, h or h - rank)
        if self.form == "block_identity_left":
            y = put_back(torch.cat([z, y], -1).flatten(-2), self.rows)
        else:
            y = y.flatten(-2)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class LatentRows:
    """Some outputs of a :class:`LatentLinear` as if they were their own layer: keys or values of a shared latent."""

    def __init__(self, shared: LatentLinear, start: int, stop: int):
        self.shared, self.rows = shared, slice(start, stop)

    def shift(self):
        bias = self.shared.shift()
        return None if bias is None else bias[self.rows]

    def up(self, z):
        return nn.functional.linear(z, self.up_matrix(z), self.shift())

    def up_matrix(self, like):
        return self.shared.up_matrix(like)[self.rows]
