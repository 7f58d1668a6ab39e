"""From unrounded factors to the tensors of the runtime: junction, quantisation, sparse part.

Shape legend: O outputs, N inputs, R latent width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ...architectures import Dense
from ...calibration.moments import BlockMoments
from ...linalg.junction import apply_junction
from ...linalg.lowrank import metric_error
from ...linalg.quantization import Quantized, dequantize, quantize, refine_quantized
from ...modules import QuantizedTensor, build
from ..result import Latent
from .factor import Fit, product
from .layout import Slot
from .measures import as_dense
from .report import Report

__all__ = ["Parts", "in_junction", "store", "store_all"]

# Scales and lows are chosen among bf16 numbers, so that they stay what the codes were chosen for in every stored dtype.
SCALES = torch.bfloat16


class Parts(NamedTuple):
    """Factors in a junction, by the names of the runtime."""

    numbers: dict[str, Tensor]  # to be rounded or quantised
    indices: dict[str, Tensor]
    condition: float | None  # of the block that was inverted


def in_junction(slot: Slot, fit: Fit) -> Parts:
    """``B A`` in the method's junction (Sec. 3.3)."""
    if slot.alone:
        return Parts({}, {}, None)
    if slot.split:
        return _heads_in_junction(slot, fit)
    method = slot.method
    junction = apply_junction(fit.B, fit.A, method.junction, limit=method.condition_limit)
    A, B = junction.A, junction.B
    if method.junction == "lu":
        rank, wide, tall = fit.A.shape[0], fit.A.shape[1], fit.B.shape[0]
        A = A[tuple(torch.triu_indices(rank, wide, device=A.device))]
        B = B[tuple(torch.tril_indices(tall, rank, -1, device=A.device))]
    indices = {"columns": junction.columns, "rows": junction.rows}
    return Parts({"A": A, "B": B}, {k: i for k, i in indices.items() if i is not None}, junction.condition)


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


def store(slot: Slot, fit: Fit, parts: Parts, dtype: torch.dtype) -> tuple[Latent, Report]:
    """The runtime's tensors out of the factors ``parts`` and the rest of ``fit``, and the report with what was added."""
    spec, numbers = slot.spec(fit.report.rank), parts.numbers
    report = replace(fit.report, junction_condition=parts.condition)
    if slot.method.bits:
        numbers, how = _quantised(slot, fit, numbers, spec)
        report = replace(report, bits=slot.method.bits, quantisation=how)
    else:
        numbers = {f"{name}.weight": x for name, x in numbers.items()}
    sparse = _rows_of(fit.D, spec["nonzeros"]) if "nonzeros" in spec else {}
    bias = {} if fit.bias is None else {"bias": fit.bias}
    latent = _as_built(spec, parts.indices | numbers | sparse | bias, dtype)
    if slot.method.bits and fit.mean is not None:
        latent = _with_the_mean_of_rounding(fit, latent)
    return latent, report


def store_all(
    layout: dict[str, Slot],
    fits: dict[str, Fit],
    dense: dict[str, Dense],
    moments: BlockMoments,
    *,
    parts: Mapping[str, Parts] = MappingProxyType({}),
) -> tuple[dict[str, Latent], dict[str, Report], dict[str, Callable[[BlockMoments], float]]]:
    """Store every fit; the tensors, the reports, and the error of every module on any moments.

    Args:
        layout, fits, dense: by module.
        moments: that were fitted to.
        parts: junctions that are made already.
    """
    latents, reports = {}, {}
    for m, fit in fits.items():
        made = parts[m] if m in parts else in_junction(layout[m], fit)
        latents[m], reports[m] = store(layout[m], fit, made, dense[m].weight.dtype)
    stored = _Stored(latents)
    errors = {m: partial(fit.measure, stored) for m, fit in fits.items()}
    for m, report in reports.items():
        if report.bits:
            reports[m] = replace(report, relative_error=errors[m](moments))
    return latents, reports, errors


@dataclass(frozen=True)
class _Stored(Mapping):
    """What stored projections amount to, made when looked at."""

    projections: dict[str, Latent]

    def __getitem__(self, module: str) -> Dense:
        return as_dense(self.projections[module])

    def __iter__(self):
        return iter(self.projections)

    def __len__(self) -> int:
        return len(self.projections)


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


def _quantised(slot: Slot, fit: Fit, numbers: dict[str, Tensor], spec: dict) -> tuple[dict[str, Tensor], str]:
    """Codes, scales and lows of the factors (App. I.1), refined where both are stored in full and fit this layer."""
    method, how = slot.method, "rounded"
    rounded = {name: _quantise(x, method) for name, x in numbers.items() if x.numel()}
    if spec["kind"] == "latent" and spec["form"] == "plain" and fit.target is not None and "B" in rounded:
        W, C = fit.target
        target = W if fit.D is None else W - fit.D
        refined = refine_quantized(target, numbers["B"], numbers["A"], C, bits=method.bits, chunk=method.chunk)
        refined = {"A": _in_stored_scales(refined.A), "B": _in_stored_scales(refined.B)}
        if _error(refined, target, C) < _error(rounded, target, C):
            rounded, how = refined, "refined"
    empty, tensors = torch.zeros(0), {}
    for name in numbers:
        q = rounded.get(name)
        codes = empty.to(torch.uint8) if q is None else QuantizedTensor.pack(q.codes, method.bits)
        tensors |= {
            f"{name}.codes": codes,
            f"{name}.scale": q.scale if q else empty,
            f"{name}.low": q.low if q else empty,
        }
    return tensors, how


def _quantise(x: Tensor, method) -> Quantized:
    return quantize(x, bits=method.bits, chunk=method.chunk, scale_dtype=SCALES)


def _in_stored_scales(q: Quantized) -> Quantized:
    return q._replace(scale=q.scale.to(SCALES), low=q.low.to(SCALES))


def _error(factors: dict[str, Quantized], target: Tensor, C: Tensor) -> float:
    B, A = (dequantize(factors[name], C.dtype) for name in "BA")
    return metric_error(target - B @ A, target, C)


def _with_the_mean_of_rounding(fit: Fit, latent: Latent) -> Latent:
    """Its bias takes the mean of what rounding changed."""
    bias, lost = latent.tensors["bias"], product(fit).weight - as_dense(latent).weight
    moved = (bias.double() + lost @ fit.mean).to(bias.dtype)
    return Latent(latent.spec, latent.tensors | {"bias": moved})
