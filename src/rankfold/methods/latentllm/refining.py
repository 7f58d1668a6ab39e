"""Codes of quantised factors: rounded, or refined under rounding in whatever junction they are stored (App. I.1).

Shape legend: G groups of outputs (heads that have factors of their own, or 1), O outputs, N inputs, R latent width.
"""

from typing import Any

import torch
from torch import Tensor

from ..._utils.present import present
from ...linalg.quantization import Quantized, quantize
from ...linalg.quantized_factors import StoredFactor, refine_factors
from .factor import Fit
from .layout import Slot

# Scales and lows are chosen among bf16 numbers, so that they stay what the codes were chosen for in every stored dtype.
SCALES = torch.bfloat16


def rounded_codes(slot: Slot, numbers: dict[str, Tensor]) -> dict[str, Quantized | None]:
    """Codes of each factor by itself; ``None`` for one that stores no number."""
    form: dict[str, Any] = {"bits": slot.method.bits, "chunk": slot.method.chunk, "scale_dtype": SCALES}
    return {name: quantize(x, **form) if x.numel() else None for name, x in numbers.items()}


def refined_codes(
    slot: Slot, fit: Fit, numbers: dict[str, Tensor], indices: dict[str, Tensor]
) -> dict[str, Quantized | None]:
    """Codes of both factors, moved so that together they are near the target; entries the junction fixes stay exact.

    Args:
        numbers, indices: of the factors in their junction, by the names of the runtime.
    """
    (A_name, A), (B_name, B) = numbers.items()
    rank = fit.report.rank
    A, B = _stored_A(slot, A, rank), _stored_B(slot, B, rank)
    W, C, M = present(fit.target)
    groups = len(B.free)
    if M is not None and groups == 1:
        M = torch.block_diag(*M)[None]
    if "columns" in indices:
        columns = indices["columns"]
        W, C = W[:, columns], C[columns][:, columns]
    if "rows" in indices:
        rows = indices["rows"]
        W = W[rows]
        M = M if M is None else M[:, rows][:, :, rows]
    latents = None
    if slot.head_identity:  # the identity comes last: free entries are on the left
        latents = indices["B.order"].roll(-slot.head_dim, -1)
    form: dict[str, Any] = {"bits": slot.method.bits, "chunk": slot.method.chunk, "scale_dtype": SCALES}
    found = refine_factors(W.unflatten(0, (groups, -1)), B, A, C, M=M, latents=latents, **form)
    return {A_name: found.A, B_name: found.B}


def _stored_A(slot: Slot, numbers: Tensor, rank: int) -> StoredFactor:
    """``(1, R, N)``, columns in the order of the junction; ``(G, R, N)`` for split heads."""
    if slot.split:
        return StoredFactor.full(numbers.unflatten(0, (slot.heads, -1)))
    junction = slot.method.junction
    if junction not in ("block_identity_right", "lu"):
        return StoredFactor.full(numbers)
    fixed = numbers.new_zeros(1, rank, slot.wide)
    free = torch.ones_like(fixed, dtype=torch.bool)
    if junction == "lu":
        return StoredFactor(numbers, free.triu(), fixed)
    free[..., :rank] = False
    fixed.diagonal(dim1=1, dim2=2).fill_(1)
    return StoredFactor(numbers, free, fixed)


def _stored_B(slot: Slot, numbers: Tensor, rank: int) -> StoredFactor:
    """``(G, O, R)``, rows in the order of the junction."""
    if slot.head_identity:
        fixed = numbers.new_zeros(slot.heads, slot.head_dim, rank)
        fixed[..., rank - slot.head_dim :].diagonal(dim1=1, dim2=2).fill_(1)
        free = torch.ones_like(fixed, dtype=torch.bool)
        free[..., rank - slot.head_dim :] = False
        return StoredFactor(numbers, free, fixed)
    junction = slot.method.junction
    if junction not in ("block_identity_left", "lu"):
        return StoredFactor.full(numbers)
    groups = slot.heads if slot.split else 1
    fixed = numbers.new_zeros(groups, slot.out // groups, rank)
    free = torch.ones_like(fixed, dtype=torch.bool)
    fixed.diagonal(dim1=1, dim2=2).fill_(1)
    if junction == "lu":
        return StoredFactor(numbers, free.tril(-1), fixed)
    free[:, :rank] = False
    return StoredFactor(numbers, free, fixed)
