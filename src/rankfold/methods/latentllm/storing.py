"""From unrounded factors to the tensors of the runtime: junction, quantisation, sparse correction.

Shape legend: O outputs, N inputs, R latent width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...linalg.junction import apply_junction
from ...linalg.lowrank import metric_error
from ...linalg.quantization import Quantized, dequantize, quantize, refine_quantized
from ...modules import QuantizedTensor, build
from ..result import Latent
from .factor import Fit
from .layout import Slot

__all__ = ["Parts", "in_junction", "put_together", "store"]

# Scales and lows are chosen among bf16 numbers, so that they stay what the codes were chosen for in every stored dtype.
SCALES = torch.bfloat16


class Parts(NamedTuple):
    """Factors in a junction, by the names of the runtime."""

    numbers: dict[str, Tensor]  # to be rounded or quantised
    indices: dict[str, Tensor]
    condition: float  # of the block that was inverted


def store(slot: Slot, fit: Fit, dtype: torch.dtype) -> Latent:
    """The fit as the method's options store it; completes ``fit.report``."""
    parts = _heads_in_junction(slot, fit) if slot.split else in_junction(slot, fit.B, fit.A)
    return put_together(slot, fit, parts, dtype)


def in_junction(slot: Slot, B: Tensor, A: Tensor) -> Parts:
    """``B A`` in the method's junction (Sec. 3.3)."""
    method = slot.method
    junction = apply_junction(B, A, method.junction, limit=method.condition_limit)
    stored_A, stored_B = junction.A, junction.B
    if method.junction == "lu":
        rank, wide, tall = A.shape[0], A.shape[1], B.shape[0]
        stored_A = stored_A[tuple(torch.triu_indices(rank, wide, device=A.device))]
        stored_B = stored_B[tuple(torch.tril_indices(tall, rank, -1, device=A.device))]
    indices = {"columns": junction.columns, "rows": junction.rows}
    indices = {name: index for name, index in indices.items() if index is not None}
    return Parts({"A": stored_A, "B": stored_B}, indices, junction.condition)


def _heads_in_junction(slot: Slot, fit: Fit) -> Parts:
    """Every head in a junction of its own (App. D)."""
    method = slot.method
    heads = [
        apply_junction(*BA, method.junction, limit=method.condition_limit) for BA in zip(fit.B, fit.A, strict=True)
    ]
    numbers = {"A": torch.cat([h.A for h in heads]), "B": torch.stack([h.B for h in heads])}
    indices = {}
    if method.junction == "block_identity_left":
        indices["rows"] = torch.cat([h.rows + i * slot.head_dim for i, h in enumerate(heads)])
    return Parts(numbers, indices, max(h.condition for h in heads))


def put_together(slot: Slot, fit: Fit, parts: Parts, dtype: torch.dtype) -> Latent:
    """The runtime's tensors out of the factors ``parts`` and the rest of ``fit``."""
    spec, tensors = slot.spec(fit.report["rank"]), dict(parts.indices)
    tensors |= _quantised(slot, fit, parts) if slot.method.bits else parts.numbers
    if "nonzeros" in spec:
        tensors |= _rows_of(fit.D, spec["nonzeros"])
    if fit.bias is not None:
        tensors["bias"] = fit.bias
    fit.report["junction_condition"] = parts.condition
    latent = _as_built(spec, tensors, dtype)
    if slot.method.bits and fit.given is not None:
        _account_for_rounding(fit, latent)
    return latent


def _as_built(spec: dict, tensors: dict[str, Tensor], dtype: torch.dtype) -> Latent:
    """With the integer types the runtime expects; a tensor it does not know, or misses, is a ``KeyError``."""
    with torch.device("meta"):
        wanted = build(spec).state_dict()
    cast = {
        name: t.to(dtype if wanted[name].is_floating_point() else wanted[name].dtype) for name, t in tensors.items()
    }
    return Latent(spec, {name: cast[name] for name in wanted})


def _rows_of(D: Tensor, count: int) -> dict[str, Tensor]:
    """The ``count`` largest entries of ``D`` (O, N), row by row."""
    keep = D.abs().flatten().topk(count).indices.sort().values
    in_row = torch.bincount(keep // D.shape[1], minlength=D.shape[0])
    starts = torch.cat([in_row.new_zeros(1), in_row.cumsum(0)])
    return {"sparse.values": D.flatten()[keep], "sparse.columns": keep % D.shape[1], "sparse.starts": starts}


def _quantised(slot: Slot, fit: Fit, parts: Parts) -> dict[str, Tensor]:
    """Codes, scales and lows of the factors (App. I.1), refined where both are stored in full and fit this layer."""
    method, spec = slot.method, slot.spec(fit.report["rank"])
    rounded = {name: _quantise(x, method) for name, x in parts.numbers.items() if x.numel()}
    fit.report.update({"bits": method.bits, "quantisation": "rounded"})
    if spec["kind"] == "latent" and spec["form"] == "plain" and fit.target is not None and "B" in rounded:
        target = fit.target if fit.D is None else fit.target - fit.D
        B, A, C = parts.numbers["B"], parts.numbers["A"], fit.given.C
        refined = refine_quantized(target, B, A, C, bits=method.bits, chunk=method.chunk)
        refined = {"A": _in_stored_scales(refined.A), "B": _in_stored_scales(refined.B)}
        if _error(refined, target, C) < _error(rounded, target, C):
            rounded, fit.report["quantisation"] = refined, "refined"
    empty = torch.zeros(0)
    tensors = {}
    for name in parts.numbers:
        q = rounded.get(name)
        codes = empty.to(torch.uint8) if q is None else QuantizedTensor.pack(q.codes, method.bits)
        tensors |= {
            f"{name}.codes": codes,
            f"{name}.scale": q.scale if q else empty,
            f"{name}.low": q.low if q else empty,
        }
    return tensors


def _quantise(x: Tensor, method) -> Quantized:
    return quantize(x, bits=method.bits, chunk=method.chunk, scale_dtype=SCALES)


def _in_stored_scales(q: Quantized) -> Quantized:
    return q._replace(scale=q.scale.to(SCALES), low=q.low.to(SCALES))


def _error(factors: dict[str, Quantized], target: Tensor, C: Tensor) -> float:
    B, A = (dequantize(factors[name], C.dtype) for name in "BA")
    return metric_error(target - B @ A, target, C)


def _account_for_rounding(fit: Fit, latent: Latent) -> None:
    """Let the bias take the mean of what rounding changed, and report the error of what is stored."""
    fitted = fit.B @ fit.A
    fitted = fitted.flatten(0, 1) if fitted.dim() == 3 else fitted
    fitted = fitted if fit.D is None else fitted + fit.D
    stored = _runtime_weight(latent).to(fitted)
    if fit.bias is not None and fit.given.centred:
        bias = latent.tensors["bias"]
        latent.tensors["bias"] = (bias.double() + (fitted - stored) @ fit.given.mean).to(bias.dtype)
    if fit.target is not None:
        fit.report["relative_error"] = metric_error(fit.target - stored, fit.target, fit.given.C)
    else:
        fit.report["rounding_error"] = metric_error(fitted - stored, fitted, fit.given.C)


def _runtime_weight(latent: Latent) -> Tensor:
    """``(O, N)`` weight that the runtime's module amounts to, by running it on the identity in fp64."""
    tensors = {k: t.double() if t.is_floating_point() else t for k, t in latent.tensors.items()}
    with torch.device("meta"):
        module = build(latent.spec)
    module.load_state_dict(tensors, assign=True)
    x = torch.eye(latent.spec["in"], dtype=torch.float64, device=next(iter(tensors.values())).device)
    with torch.no_grad():
        y = module(x)
    return (y if latent.spec["bias"] is False else y - tensors["bias"]).T
