"""Factors refined under quantisation, whichever entries are stored, against a dense least-squares solver."""

import pytest
import torch
from problems import KINDS, heads, problem, rms_error

from rankfold.linalg.junction import JUNCTIONS, apply_junction
from rankfold.linalg.lowrank import low_rank
from rankfold.linalg.preconditioner import preconditioner
from rankfold.linalg.quantization import dequantize, quantize
from rankfold.linalg.quantized_factors import StoredFactor, refine_factors

RANK = 5


def stored(junction: str, kind: str = "gaussian"):
    """A problem in the order of the pivots, and both factors as the junction stores them."""
    p = problem(kind)
    out = low_rank(p.W, preconditioner(p.C, "rootcov", ridge=1e-9), rank=RANK)
    found = apply_junction(out.B, out.A, junction)
    columns = torch.arange(p.W.shape[1]) if found.columns is None else found.columns
    rows = torch.arange(len(p.W)) if found.rows is None else found.rows
    W, C = p.W[rows][:, columns], p.C[columns][:, columns]
    A, B = StoredFactor.full(found.A), StoredFactor.full(found.B)
    wide, tall = W.shape[1], len(W)
    every_A, every_B = (torch.ones(1, *shape, dtype=torch.bool) for shape in ((RANK, wide), (tall, RANK)))
    if junction == "block_identity_right":
        every_A[..., :RANK] = False
        A = StoredFactor(found.A, every_A, torch.eye(RANK, wide, dtype=C.dtype)[None])
    if junction == "block_identity_left":
        every_B[:, :RANK] = False
        B = StoredFactor(found.B, every_B, torch.eye(tall, RANK, dtype=C.dtype)[None])
    if junction == "lu":
        upper, lower = every_A.triu(), every_B.tril(-1)
        A = StoredFactor(found.A[upper[0]], upper, torch.zeros(1, RANK, wide, dtype=C.dtype))
        B = StoredFactor(found.B[lower[0]], lower, torch.eye(tall, RANK, dtype=C.dtype)[None])
    return p.X[:, columns], W[None], B, A, C


def product(B: StoredFactor, A: StoredFactor, out) -> torch.Tensor:
    whole = [f.filled(dequantize(q, torch.float64)) for f, q in ((B, out.B), (A, out.A))]
    return (whole[0] @ whole[1])[0]


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("junction", JUNCTIONS)
def test_refinement_starts_at_rounding_and_never_ends_above(junction, kind, bits):
    X, W, B, A, C = stored(junction, kind)
    out = refine_factors(W, B, A, C, bits=bits, chunk=8)
    rounded = [f.filled(dequantize(quantize(f.numbers, bits=bits, chunk=8), C.dtype)) for f in (B, A)]
    Y = X @ W[0].T
    assert out.loss_history[0] == pytest.approx(rms_error(Y, X @ (rounded[0] @ rounded[1])[0].T), rel=1e-6)
    assert out.relative_error == pytest.approx(rms_error(Y, X @ product(B, A, out).T), rel=1e-6)
    assert out.relative_error == min(out.loss_history) and len(out.loss_history) == 31


@pytest.mark.parametrize("junction", JUNCTIONS)
def test_refinement_helps_at_few_bits_in_every_junction(junction):
    for kind in ("gaussian", "outlier"):
        _, W, B, A, C = stored(junction, kind)
        out = refine_factors(W, B, A, C, bits=3, chunk=12)
        assert out.relative_error < 0.995 * out.loss_history[0]  # of which the low rank is the larger part


@pytest.mark.parametrize("junction", JUNCTIONS)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("metric", [False, True])
def test_a_move_is_the_least_squares_move_of_the_free_entries(junction, side, metric, monkeypatch):
    from rankfold.linalg import quantized_factors

    monkeypatch.setattr(quantized_factors, "RIDGE", 0.0)
    _, W, B, A, C = stored(junction)
    M = heads(1, W.shape[1], W.shape[1])[0]
    M = (M @ M.T)[None] if metric else None
    problem = quantized_factors._Problem(W, C, M, None)
    parts = [StoredFactor(f.numbers + 0.1 * f.numbers.cos(), f.free, f.fixed) for f in (B, A)]
    whole = [f.filled(f.numbers) for f in parts]
    at = quantized_factors._Rounded([], *whole, *problem.gap(*whole))
    move = problem.move(side, at, parts[side].free)
    # the dense way: every free entry a column of one least-squares problem
    root, left = (
        torch.linalg.cholesky(C),
        torch.eye(len(W[0]), dtype=C.dtype) if M is None else torch.linalg.cholesky(M[0]).T,
    )
    columns = []
    for entry in parts[side].free.nonzero():
        unit = torch.zeros_like(whole[side])
        unit[tuple(entry)] = 1
        change = unit @ whole[1] if side == 0 else whole[0] @ unit
        columns.append((left @ change[0] @ root).flatten())
    gap = left @ (W - whole[0] @ whole[1])[0] @ root
    expected = torch.linalg.lstsq(torch.stack(columns, 1), gap.flatten()).solution
    torch.testing.assert_close(move, expected, rtol=1e-6, atol=1e-8)


def test_heads_with_an_order_of_latents_of_their_own():
    """Groups that share ``A``, each with an identity in columns of its own: fixed entries stay, the error falls."""
    p, H, h = problem("gaussian"), 3, 3
    A = StoredFactor.full(low_rank(p.W, preconditioner(p.C, "rootcov", ridge=1e-9), rank=RANK).A)
    latents = torch.stack([torch.randperm(RANK, generator=torch.Generator().manual_seed(i)) for i in range(H)])
    fixed = torch.zeros(H, h, RANK, dtype=p.C.dtype)
    fixed[..., RANK - h :].diagonal(dim1=1, dim2=2).fill_(1)
    free = fixed.new_ones(fixed.shape, dtype=torch.bool)
    free[..., RANK - h :] = False
    B = StoredFactor(heads(H, h, RANK - h), free, fixed)
    whole = [B.filled(B.numbers).gather(2, latents.argsort(1)[:, None].expand(-1, h, -1)), A.filled(A.numbers)]
    W = whole[0] @ whole[1]
    M = torch.stack([m @ m.T for m in heads(H, h, h, seed=3)])
    out = refine_factors(W, B, A, p.C, M=M, latents=latents, bits=3, chunk=8)
    whole = [f.filled(dequantize(q, torch.float64)) for f, q in ((B, out.B), (A, out.A))]
    gap = W - whole[0].gather(2, latents.argsort(1)[:, None].expand(-1, h, -1)) @ whole[1]
    lost, whole = ((M @ x @ p.C * x).sum().item() for x in (gap, W))
    assert out.relative_error == pytest.approx((lost / whole) ** 0.5, rel=1e-9)
    assert out.relative_error < 0.8 * out.loss_history[0]


def test_scale_of_the_statistics_does_not_matter():
    _, W, B, A, C = stored("symmetric")
    a, b = (refine_factors(W, B, A, s * C, bits=3, chunk=8, steps=6) for s in (1.0, 2.0**20))
    assert torch.equal(a.B.codes, b.B.codes) and torch.equal(a.A.codes, b.A.codes)


def test_inputs_whose_moment_is_indefinite_by_rounding():
    _, W, B, A, C = stored("block_identity_right")
    values, vectors = torch.linalg.eigh(C)
    values[0] = -0.05 * values[-1]
    out = refine_factors(W, B, A, vectors * values @ vectors.T, bits=3, chunk=8)
    assert all(q.scale.isfinite().all() for q in (out.B, out.A)) and out.relative_error <= out.loss_history[0]


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda W, B, A, C: refine_factors(W, A, B, C, bits=4, chunk=8),
            r"must match W \(1, 9, 12\), got \(1, 5, 12\)",
        ),
        (lambda W, B, A, C: refine_factors(W, B, A, C, bits=4, chunk=8, steps=-1), "steps must be >= 0, got -1"),
        (lambda W, B, A, C: refine_factors(W, B, A, C, M=C[None], bits=4, chunk=8), r"M must be \(1, 9, 9\)"),
        (
            lambda W, B, A, C: refine_factors(W, B, A._replace(free=A.free.tril()), C, bits=4, chunk=8),
            "free entries must be a staircase",
        ),
    ],
)
def test_errors_say_what_to_fix(change, message):
    with pytest.raises(ValueError, match=message):
        change(*stored("symmetric")[1:])
