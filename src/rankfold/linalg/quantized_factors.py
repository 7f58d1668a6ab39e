"""Low-rank factors refined under quantisation, whichever of their entries are stored.

Shape legend: G groups of outputs (heads, or 1), O outputs of a group, N input width, R rank.

LatentLLM (arXiv:2505.18413), App. I.1, Eq. 239-240, for the factors of every junction (Sec. 3.3, App. A.2): entries
that a junction fixes (identity blocks, unit diagonals, zeros of triangles) stay exact, and the others make up for what
rounding changes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rankfold.linalg.psd import check_moment
from rankfold.linalg.quantization import Quantized, dequantize, quantize

RIDGE = 1e-2  # relative damping of metrics that are inverted: a long move along what hardly counts would cost range


class StoredFactor(NamedTuple):
    """A factor of which some entries are stored and the others are fixed."""

    numbers: Tensor  # any shape; in row-major order the free entries
    free: Tensor  # (G or 1, rows, columns) bool
    fixed: Tensor  # of the same shape: the other entries, and zeros

    @classmethod
    def full(cls, numbers: Tensor) -> "StoredFactor":
        """A factor all of whose entries are stored."""
        shape = numbers.shape if numbers.dim() == 3 else (1, *numbers.shape)
        return cls(numbers, numbers.new_ones(shape, dtype=torch.bool), numbers.new_zeros(shape))

    def filled(self, numbers: Tensor) -> Tensor:
        """The whole factor with these numbers at its free entries."""
        return self.fixed.to(numbers).masked_scatter(self.free, numbers)


class QuantizedFactors(NamedTuple):
    """Result of :func:`refine_factors`; a factor that stores no number is ``None``."""

    B: Quantized | None
    A: Quantized | None
    loss_history: list[float]  # relative error of the quantised product: of plain rounding, then of every step tried
    relative_error: float  # the smallest of them


@torch.no_grad()
def refine_factors(
    W: Tensor,
    B: StoredFactor,
    A: StoredFactor,
    C: Tensor,
    *,
    M: Tensor | None = None,
    latents: Tensor | None = None,
    bits: int,
    chunk: int,
    steps: int = 30,
    scale_dtype: torch.dtype = torch.float32,
) -> QuantizedFactors:
    r"""Move the stored entries of low-rank factors so that their rounded values fit better.

    Minimises :math:`\sum_g \|M_g^{1/2} (W_g - Q[B_g] Q[A]) C^{1/2}\|^2` with the straight-through estimator of
    LatentLLM Eq. 239-240: gradients are taken at the rounded factors and applied to hidden unrounded ones. The paper
    leaves optimiser and step open. Here a step is the damped least-squares move of one factor's free entries, halved
    for the steps after it where it did not lower the error, so no learning rate depends on the data. The result is
    never worse than plain rounding.

    The free entries must be a staircase: of ``A`` what lies above or right of a free entry is free too, of ``B`` what
    lies below or left of it. Then triangular roots of both metrics map the set onto itself, and the least-squares move
    is two triangular solves, a mask, and two triangular solves. Identity blocks and triangles are staircases once rows
    and columns are in the order of their pivots.

    Args:
        W: ``(G, O, N)`` target.
        B: ``(G, O, R)``.
        A: ``(1, R, N)``, one for all groups, or ``(G, R, N)``.
        C: ``(N, N)`` second moment of the inputs; any scale.
        M: ``(G, O, O)`` metric of the outputs of each group; default: the identity.
        latents: ``(G, R)`` which row of ``A`` each column of ``B`` multiplies; default: the same.
        bits, chunk: format of the numbers of both factors.
        steps: ``>= 0``.
        scale_dtype: of scales and lows.

    Raises:
        ValueError: shapes disagree, free entries are no staircase, format or ``steps`` out of range.

    Cost: O(N^3) once, and per step O(G O N (R + N) + R N^2), in fp64.
    """
    _check(W, B, A, C, M, steps)
    work = torch.float64
    problem = _Problem(W.to(work), C.to(work), None if M is None else M.to(work), latents)

    def rounded(part: StoredFactor) -> tuple[Quantized | None, Tensor]:
        if not part.numbers.numel():
            return None, part.filled(part.numbers)
        codes = quantize(part.numbers, bits=bits, chunk=chunk, scale_dtype=scale_dtype)
        return codes, part.filled(dequantize(codes, work))

    def together(B: tuple[Quantized | None, Tensor], A: tuple[Quantized | None, Tensor]) -> _Rounded:
        return _Rounded([B[0], A[0]], B[1], A[1], *problem.gap(B[1], A[1]))

    hidden = [part._replace(numbers=part.numbers.to(work)) for part in (B, A)]
    factors = [rounded(part) for part in hidden]
    best = together(*factors)
    history, lengths = [best.error], [1.0, 1.0]
    for step in range(steps):
        side = step % 2
        numbers, move = hidden[side].numbers, problem.move(side, best, hidden[side].free)
        moved = hidden[side]._replace(numbers=numbers + lengths[side] * move.view_as(numbers))
        tried = list(factors)
        tried[side] = rounded(moved)
        now = together(*tried)
        history.append(now.error)
        if now.error < best.error:
            best, factors, hidden[side] = now, tried, moved
        else:  # a shorter move changes fewer codes
            lengths[side] /= 2
    B_codes, A_codes = best.codes
    return QuantizedFactors(B_codes, A_codes, history, best.error)


class _Rounded(NamedTuple):
    codes: list[Quantized | None]  # of B and A
    B: Tensor  # (G, O, R) whole
    A: Tensor  # (1 or G, R, N)
    weighted: Tensor  # (G, O, N), M (W - B A) C
    error: float  # relative


class _Problem:
    """The loss of :func:`refine_factors`, and its exact minimiser over the free entries of one factor."""

    def __init__(self, W: Tensor, C: Tensor, M: Tensor | None, latents: Tensor | None):
        self.W, self.C, self.M, self.latents = W, C, M, latents
        self.root_C = _upper(C)
        self.root_M = None if M is None else _upper(M)
        self.energy = (self._weighted(W) * W).sum().clamp_min(torch.finfo(W.dtype).tiny)

    def gap(self, B: Tensor, A: Tensor) -> tuple[Tensor, float]:
        """``M (W - B A) C``, and the relative error."""
        gap = self.W - self._on_rows_of_A(B) @ A
        weighted = self._weighted(gap)
        return weighted, ((weighted * gap).sum() / self.energy).clamp_min(0).sqrt().item()

    def move(self, side: int, at: _Rounded, free: Tensor) -> Tensor:
        """From the rounded factors to the least error that the free entries of ``B`` (0) or ``A`` (1) can reach."""
        return (self._move_of_A if side else self._move_of_B)(at, free)[free]

    def _move_of_B(self, at: _Rounded, free: Tensor) -> Tensor:
        K, G = at.weighted @ at.A.mT, at.A @ self.C @ at.A.mT
        if self.latents is not None:
            K = K.gather(-1, self.latents[:, None].expand_as(K))
            G = G[0][self.latents[:, :, None], self.latents[:, None]]
        root = _lower(G)
        K = K if self.root_M is None else torch.linalg.solve_triangular(self.root_M, K, upper=True)
        K = torch.linalg.solve_triangular(root.mT, K, upper=True, left=False) * free
        K = torch.linalg.solve_triangular(root, K, upper=False, left=False)
        return K if self.root_M is None else torch.linalg.solve_triangular(self.root_M.mT, K, upper=False)

    def _move_of_A(self, at: _Rounded, free: Tensor) -> Tensor:
        B = self._on_rows_of_A(at.B)
        K, H = B.mT @ at.weighted, B.mT @ (B if self.M is None else self.M @ B)
        if len(free) < len(K):  # all groups share A
            K, H = K.sum(0, keepdim=True), H.sum(0, keepdim=True)
        root = _lower(H)
        K = torch.linalg.solve_triangular(root, K, upper=False)
        K = torch.linalg.solve_triangular(self.root_C.mT, K, upper=False, left=False) * free
        K = torch.linalg.solve_triangular(self.root_C, K, upper=True, left=False)
        return torch.linalg.solve_triangular(root.mT, K, upper=True)

    def _weighted(self, gap: Tensor) -> Tensor:
        weighted = gap @ self.C
        return weighted if self.M is None else self.M @ weighted

    def _on_rows_of_A(self, B: Tensor) -> Tensor:
        """``B`` with its columns in the order of the rows of ``A``."""
        return B if self.latents is None else B.gather(-1, torch.argsort(self.latents, -1)[:, None].expand_as(B))


def _lower(S: Tensor) -> Tensor:
    """Lower triangular root ``L L^T`` of a damped metric, or of a stack of them."""
    damped = S.clone()
    diagonal = damped.diagonal(dim1=-2, dim2=-1)
    # Each by its own: one may be a million times larger.
    diagonal += RIDGE * diagonal.clamp_min(0) + torch.finfo(S.dtype).tiny
    root, info = torch.linalg.cholesky_ex(damped)
    if info.any():  # a sum of activations may be indefinite beyond the damping; its negative part is rounding
        values, vectors = torch.linalg.eigh(damped)
        values = values.clamp_min(torch.finfo(S.dtype).eps * values[..., -1:])
        root = torch.linalg.qr((vectors * values.sqrt()[..., None, :]).mT).R.mT
    return root


def _upper(S: Tensor) -> Tensor:
    """Upper triangular root ``U U^T``."""
    return _lower(S.flip(-1, -2)).flip(-1, -2)


def _check(W: Tensor, B: StoredFactor, A: StoredFactor, C: Tensor, M: Tensor | None, steps: int) -> None:
    check_moment(C, W.shape[-1])
    (groups, out, wide), rank = W.shape, A.free.shape[1]
    if B.free.shape != (groups, out, rank) or A.free.shape not in ((1, rank, wide), (groups, rank, wide)):
        raise ValueError(
            f"B (groups, out, r) A (1 or groups, r, in) must match W {tuple(W.shape)}, got {tuple(B.free.shape)} and "
            f"{tuple(A.free.shape)}"
        )
    if M is not None and M.shape != (groups, out, out):
        raise ValueError(f"M must be ({groups}, {out}, {out}), got {tuple(M.shape)}")
    if steps < 0:
        raise ValueError(f"steps must be >= 0, got {steps}")
    if not (_rises(A.free) and _rises(B.free.mT)):
        raise ValueError("free entries must be a staircase: of A up and to the right, of B down and to the left")


def _rises(free: Tensor) -> bool:
    """Whether what lies above or right of a free entry is free."""
    return bool((free[:, 1:] <= free[:, :-1]).all() and (free[:, :, 1:] >= free[:, :, :-1]).all())
