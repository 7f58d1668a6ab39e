"""Everything is made on the device of the input.

Here a machine has one device only, so the default becomes "meta", which holds no numbers: what forgets to say where it
belongs cannot be combined with the input.
"""

import pytest
import torch
from modegpt_problems import mlp, query_key
from problems import heads, problem

from rankfold.linalg.column_row import column_row, column_row_bounds, eliminate_pairs
from rankfold.linalg.elimination import eliminate_groups, eliminate_units
from rankfold.linalg.joint_qk import choose_ranks, joint_qk
from rankfold.linalg.junction import JUNCTIONS, apply_junction
from rankfold.linalg.lowrank import low_rank
from rankfold.linalg.nystrom import nystrom
from rankfold.linalg.preconditioner import PRECONDITIONERS, preconditioner
from rankfold.linalg.psd import metric_root, psd_root, spd_inverse
from rankfold.linalg.quantization import dequantize, quantize
from rankfold.linalg.quantized_factors import StoredFactor, refine_factors
from rankfold.linalg.rotations import rope_rotations
from rankfold.linalg.sparse import low_rank_plus_sparse, sparse

P, M, QK = problem("gaussian"), mlp("gaussian"), query_key()
GRAMS = torch.einsum("shtn,shtm->shnm", QK.Q, QK.Q), torch.einsum("stn,stm->snm", QK.K, QK.K)
PRODUCT = (GRAMS[0] * GRAMS[1][:, None]).sum(0)  # (H, N, N)
HEADS = heads(4, 6, 12), heads(2, 6, 12, seed=1)
FREQUENCIES = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
FACTORS = heads(1, 9, 4)[0], heads(1, 4, 12)[0]
ROOT = preconditioner(P.C, "rootcov", ridge=1e-3)
CALLS = {
    "metric_root": lambda: metric_root(P.C, ridge=1e-3),
    "metric_root of nothing": lambda: metric_root(0 * P.C, ridge=1e-3),
    "psd_root": lambda: psd_root(P.C, ridge=1e-3),
    "spd_inverse": lambda: spd_inverse(P.C, shift=1.0),
    "column_row": lambda: column_row(QK.C_q, QK.C_k, rank=4, rotary_dim=4),
    "column_row_bounds": lambda: column_row_bounds(QK.C_q, QK.C_k, torch.arange(4, device="cpu")),
    "eliminate_pairs": lambda: eliminate_pairs(PRODUCT, rank=4, rotary_dim=4),
    "eliminate_groups": lambda: eliminate_groups(PRODUCT, 3),
    "eliminate_units": lambda: eliminate_units(M.W, torch.linalg.inv(M.C), rank=7),
    "nystrom": lambda: nystrom(M.W, M.C, rank=7),
    "nystrom, output metric": lambda: nystrom(M.W, M.C, rank=7, output_root=torch.diag(M.W[:, 0])),
    "nystrom, leverage": lambda: nystrom(M.W, M.C, rank=7, selection="leverage"),
    "low_rank": lambda: low_rank(P.W, ROOT, rank=4),
    "quantize": lambda: dequantize(quantize(P.W, bits=4, chunk=8)),
    "refine_factors": lambda: refine_factors(
        P.W[None], *map(StoredFactor.full, FACTORS), P.C, bits=4, chunk=8, steps=2
    ),
    "sparse": lambda: sparse(P.W, P.C, count=20),
    "sparse, diagonal": lambda: sparse(P.W, P.C, count=20, method="diagonal"),
    "low_rank_plus_sparse": lambda: low_rank_plus_sparse(P.W, P.C, rank=3, count=10),
    "rope_rotations": lambda: rope_rotations(FREQUENCIES, 6),
    "joint_qk": lambda: joint_qk(*HEADS, ROOT, ranks=(6, 6), rotations=rope_rotations(FREQUENCIES, 6)),
    "choose_ranks": lambda: choose_ranks(*HEADS, ROOT, budget=400, multiple=5),
    **{f"{kind} junction": lambda kind=kind: apply_junction(*FACTORS, kind) for kind in JUNCTIONS},
    **{
        f"{kind} pre-conditioner": lambda kind=kind: preconditioner(P.C, kind, ridge=1e-3, mean_abs=P.mean_abs).apply(
            P.W
        )
        for kind in PRECONDITIONERS
    },
}


def tensors(result) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for part in result for t in tensors(part)] if isinstance(result, tuple | list) else []


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results_are_where_the_input_is(call):
    with torch.device("meta"):
        result = call()
    assert {t.device.type for t in tensors(result)} <= {"cpu"}
