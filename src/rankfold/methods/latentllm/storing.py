"""From unrounded factors to the tensors of the runtime: junction, quantisation, sparse part.

Shape legend: O outputs, N inputs, R latent width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ..._utils.present import present
from ...architectures import Dense
from ...calibration.moments import BlockMoments
from ...linalg.junction import apply_junction
from ...linalg.quantization import Quantized
from ...modules import QuantizedTensor, build
from ..result import Latent
from .factor import Fit, product
from .layout import Slot
from .measures import Measure, as_dense
from .refining import refined_codes, rounded_codes
from .report import Report

SAME = 1e-6  # errors are equal up to this part of them: of values, the attention-aware form looks at the mean alone


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
    indices = {"columns": junction.columns, "rows": junction.rows}
    indices = {name: order for name, order in indices.items() if order is not None}
    if method.junction == "lu" and not method.bits:
        rank = len(A)
        square = A[:, :rank].triu() + B[:rank].tril(-1)
        return Parts({"T": square, "A": A[:, rank:], "B": B[rank:]}, indices, junction.condition)
    if method.junction == "lu":
        rank, wide, tall = fit.A.shape[0], fit.A.shape[1], fit.B.shape[0]
        A = A[tuple(torch.triu_indices(rank, wide, device=A.device))]
        B = B[tuple(torch.tril_indices(tall, rank, -1, device=A.device))]
    return Parts({"A": A, "B": B}, indices, junction.condition)


def _heads_in_junction(slot: Slot, fit: Fit) -> Parts:
    """Every head in a junction of its own (App. D)."""
    method = slot.method
    heads = [
        apply_junction(*BA, method.junction, limit=method.condition_limit) for BA in zip(fit.B, fit.A, strict=True)
    ]
    numbers = {"A": torch.cat([h.A for h in heads]), "B": torch.stack([h.B for h in heads])}
    indices = {}
    if method.junction == "block_identity_left":
        indices["rows"] = torch.cat([present(h.rows) + i * slot.head_dim for i, h in enumerate(heads)])
    return Parts(numbers, indices, max(h.condition for h in heads))


def store(
    slot: Slot, fit: Fit, parts: Parts, dtype: torch.dtype, codes: dict[str, Quantized | None] | None = None
) -> Latent:
    """The runtime's tensors out of the factors ``parts``, or ``codes`` of them, and the rest of ``fit``."""
    spec = slot.spec(fit.report.rank)
    if codes is None:
        numbers = {f"{name}.weight": x for name, x in parts.numbers.items()}
    else:
        numbers = _tensors_of(codes, slot.method.bits)
    sparse = _rows_of(present(fit.D), spec["nonzeros"]) if "nonzeros" in spec else {}
    bias = {} if fit.bias is None else {"bias": fit.bias}
    latent = _as_built(spec, parts.indices | numbers | sparse | bias, dtype)
    return latent if codes is None or fit.mean is None else _with_the_mean_of_rounding(fit, latent)


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
    made = {m: parts[m] if m in parts else in_junction(layout[m], fit) for m, fit in fits.items()}
    latents: dict[str, Latent] = {}
    errors = {m: partial(fit.measure, _Stored(latents)) for m, fit in fits.items()}
    known = _Known(latents, moments)
    reports = {m: replace(fit.report, junction_condition=made[m].condition) for m, fit in fits.items()}

    def put(module: str, codes: dict[str, Quantized | None] | None) -> None:
        latents[module] = store(layout[module], fits[module], made[module], dense[module].weight.dtype, codes)

    quantised = [m for m in fits if layout[m].method.bits]
    for m in fits:
        put(m, rounded_codes(layout[m], made[m].numbers) if m in quantised else None)
    rounded_errors = {m: known(fits[m].measure) for m in quantised}
    for m in quantised:
        rounded, before = latents[m], known(fits[m].measure)
        put(m, refined_codes(layout[m], fits[m], made[m].numbers, made[m].indices))
        worse = known(fits[m].measure) > before * (1 + SAME)  # of what modules that were fitted together compute
        latents[m] = rounded if worse else latents[m]
        facts = {"bits": layout[m].method.bits, "quantisation": "rounded" if worse else "refined"}
        reports[m] = replace(reports[m], rounded_error=rounded_errors[m], **facts)
    for m in quantised:
        reports[m] = replace(reports[m], relative_error=known(fits[m].measure))
    return latents, reports, errors


@dataclass(frozen=True)
class _Stored(Mapping):
    """What stored projections amount to, made when looked at."""

    projections: dict[str, Latent]
    looked_at: set[str] = field(default_factory=set)

    def __getitem__(self, module: str) -> Dense:
        self.looked_at.add(module)
        return as_dense(self.projections[module])

    def __iter__(self):
        return iter(self.projections)

    def __len__(self) -> int:
        return len(self.projections)


@dataclass
class _Known:
    """Errors on the moments of the fit, measured again only where a projection that they depend on has changed.

    Modules that are fitted together share a measure.
    """

    latents: dict[str, Latent]
    moments: BlockMoments
    # By measure: the projections that it looked at, and its error.
    found: dict[int, tuple[dict[str, Latent], float]] = field(default_factory=dict)

    def __call__(self, measure: Measure) -> float:
        measured, error = self.found.get(id(measure), ({}, 0.0))
        if not measured or any(self.latents[m] is not latent for m, latent in measured.items()):
            stored = _Stored(self.latents)
            error = measure(stored, self.moments)
            self.found[id(measure)] = {m: self.latents[m] for m in stored.looked_at}, error
        return error


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


def _tensors_of(codes: dict[str, Quantized | None], bits: int) -> dict[str, Tensor]:
    """Packed codes, scales and lows by the names of the runtime; empty ones of a factor that stores no number."""
    empty, tensors = torch.zeros(0), {}
    for name, q in codes.items():
        tensors |= {
            f"{name}.codes": empty.to(torch.uint8) if q is None else QuantizedTensor.pack(q.codes, bits),
            f"{name}.scale": q.scale if q else empty,
            f"{name}.low": q.low if q else empty,
        }
    return tensors


def _with_the_mean_of_rounding(fit: Fit, latent: Latent) -> Latent:
    """Its bias takes the mean of what rounding changed."""
    bias, lost = latent.tensors["bias"], product(fit).weight - as_dense(latent).weight
    moved = (bias.double() + lost @ present(fit.mean)).to(bias.dtype)
    return Latent(latent.spec, latent.tensors | {"bias": moved})
