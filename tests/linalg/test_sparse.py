"""Sparse and low-rank plus sparse weights against brute force, KKT conditions and least squares. CPU, no network."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import KINDS, problem, rms_error

from rankfold.linalg.lowrank import low_rank
from rankfold.linalg.preconditioner import preconditioner
from rankfold.linalg.sparse import (
    fista,
    hard_shrink,
    low_rank_plus_sparse,
    soft_shrink,
    sparse,
    sparse_bytes,
    sparse_factors,
)

ITERATIVE = ["hard", "soft", "ste"]


def row_least_squares(X, W, support):
    """Best values on a given support, row by row, from the raw activations."""
    D = torch.zeros_like(W)
    for i, keep in enumerate(support):
        if keep.any():
            D[i, keep] = torch.linalg.lstsq(X[:, keep], X @ W[i], driver="gelsd").solution
    return D


@pytest.mark.parametrize("method", ["diagonal", *ITERATIVE])
@pytest.mark.parametrize("kind", KINDS)
def test_count_and_error_are_those_of_the_raw_outputs(kind, method):
    p = problem(kind)
    out = sparse(p.W, p.C, count=30, method=method)
    assert int((out.D != 0).sum()) <= 30
    assert out.relative_error == pytest.approx(rms_error(p.X @ p.W.T, p.X @ out.D.T), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("method", ITERATIVE)
@pytest.mark.parametrize("kind", ["gaussian", "outlier", "wide"])
def test_values_are_least_squares_on_their_support(kind, method):
    p = problem(kind)
    D = sparse(p.W, p.C, count=25, method=method).D
    torch.testing.assert_close(D, row_least_squares(p.X, p.W, D != 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ITERATIVE)
def test_iterations_beat_the_diagonal_closed_form(method):
    p = problem("ill_conditioned")
    closed = sparse(p.W, p.C, count=40, method="diagonal").relative_error
    assert sparse(p.W, p.C, count=40, method=method).relative_error < 0.5 * closed


def test_the_three_shrinkages_are_three_algorithms():
    p = problem("gaussian")
    hard, soft, ste = (sparse(p.W, p.C, count=40, method=m) for m in ITERATIVE)
    assert hard.loss_history[1] != soft.loss_history[1] and hard.loss_history[5] != ste.loss_history[5]
    assert ste.relative_error < hard.relative_error  # zeros that come back pay off here


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**4), st.integers(0, 5))
def test_against_all_supports(seed, count):
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(40, 4, generator=g, dtype=torch.float64)
    X = X + 0.4 * X.roll(1, 1)
    W = torch.randn(2, 4, generator=g, dtype=torch.float64)
    best = 1.0
    for chosen in combinations(range(8), count):
        support = torch.zeros(8, dtype=torch.bool)
        support[list(chosen)] = True
        best = min(best, rms_error(X @ W.T, X @ row_least_squares(X, W, support.view(2, 4)).T))
    errors = {m: sparse(W, X.T @ X, count=count, method=m).relative_error for m in ("diagonal", *ITERATIVE)}
    assert min(errors.values()) >= best - 1e-9  # nobody beats the optimum
    assert errors["hard"] <= errors["diagonal"] + 1e-9
    diagonal = torch.diag(torch.tensor([1.0, 4.0, 0.5, 2.0], dtype=torch.float64))  # here the closed form is optimal
    energy = (W.square() * diagonal.diagonal()).flatten().sort().values
    exact = (energy[: 8 - count].sum() / energy.sum()).sqrt().item()
    assert sparse(W, diagonal, count=count, method="diagonal").relative_error == pytest.approx(exact, abs=1e-7)
    assert sparse(W, diagonal, count=count).relative_error == pytest.approx(exact, abs=1e-7)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 100), st.sampled_from(KINDS), st.integers(0, 60))
def test_hard_shrinkage_never_raises_the_loss(seed, kind, count):
    p = problem(kind, seed=seed)
    history = sparse(p.W, p.C, count=count).loss_history
    assert all(b <= a + 1e-7 for a, b in pairwise(history))


@pytest.mark.parametrize("method", ["diagonal", *ITERATIVE])
def test_extreme_counts_and_scale(method):
    p = problem("outlier")
    assert sparse(p.W, p.C, count=0, method=method).D.abs().sum() == 0
    torch.testing.assert_close(sparse(p.W, p.C, count=p.W.numel(), method=method).D, p.W)
    a, b = (sparse(p.W, s * p.C, count=30, method=method).D for s in (1.0, 1e6))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_shrinkage_operators():
    x = torch.tensor([-3.0, 0.5, 2.0, -0.1])
    assert soft_shrink(x, 1.0).tolist() == [-2.0, 0.0, 1.0, 0.0]  # Eq. 236 as printed gives 0 for -3
    assert hard_shrink(x, 2).tolist() == [-3.0, 0.0, 2.0, 0.0]
    assert hard_shrink(x.view(2, 2), 3).shape == (2, 2)


@pytest.mark.parametrize("kind", ["gaussian", "outlier", "wide"])
@pytest.mark.parametrize("penalty", [0.02, 0.3])
def test_fista_satisfies_the_optimality_conditions(kind, penalty):
    p = problem(kind)
    size = p.C.diagonal().sqrt()
    D = fista(p.W, p.C, penalty=penalty, iterations=3000).D
    gradient = 2 * (D - p.W) @ p.C / size  # of the smooth part, in the scaled coordinates
    weight = penalty * (2 * p.W @ p.C / size).abs().max()
    on = D != 0
    assert on.any() and not on.all()
    torch.testing.assert_close(gradient[on], -weight * D[on].sign(), rtol=1e-4, atol=1e-6 * weight.item())
    assert (gradient[~on].abs() <= weight * (1 + 1e-4)).all()


def test_fista_on_a_diagonal_moment_is_one_soft_shrinkage():
    p, size = problem("gaussian"), torch.linspace(0.5, 2, 12, dtype=torch.float64)
    out = fista(p.W, torch.diag(size**2), penalty=0.4)
    expected = soft_shrink(p.W * size, 0.4 * (p.W * size).abs().max()) / size
    torch.testing.assert_close(out.D, expected)


def test_fista_penalty_runs_from_everything_to_nothing():
    p = problem("gaussian")
    counts = [int((fista(p.W, p.C, penalty=q).D != 0).sum()) for q in (1e-3, 0.1, 0.5, 1.0)]
    assert counts == sorted(counts, reverse=True) and counts[0] > 80 and counts[-1] == 0
    assert fista(p.W, p.C, penalty=0.1).loss_history[-1] < 1


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 100), st.sampled_from(KINDS), st.integers(1, 4), st.integers(0, 30))
def test_low_rank_plus_sparse_never_gets_worse_and_beats_low_rank_alone(seed, kind, rank, count):
    p = problem(kind, seed=seed)
    out = low_rank_plus_sparse(p.W, p.C, rank=rank, count=count)
    alone = low_rank(p.W, preconditioner(p.C, "rootcov", ridge=1e-6), rank=rank).relative_error
    history = [alone, *out.loss_history]
    assert all(b <= a + 1e-7 for a, b in pairwise(history))
    assert int((out.D != 0).sum()) <= count and torch.linalg.matrix_rank(out.B @ out.A) <= rank


def test_low_rank_plus_sparse_reports_the_raw_error_and_gains_from_both_parts():
    p = problem("gaussian")
    out = low_rank_plus_sparse(p.W, p.C, rank=3, count=30, ridge=1e-12)
    run = p.X @ (out.B @ out.A + out.D).T
    assert out.relative_error == pytest.approx(rms_error(p.X @ p.W.T, run), rel=1e-6)
    assert out.relative_error < 0.8 * low_rank_plus_sparse(p.W, p.C, rank=3, count=0).relative_error
    assert low_rank_plus_sparse(p.W, p.C, rank=3, count=30, method="diagonal").relative_error > out.relative_error


def test_sparse_plus_low_rank_weights_are_mostly_found():
    p, found = problem("gaussian"), 0
    for seed in range(8):  # NP-hard: local optima exist, so not all of them
        g = torch.Generator().manual_seed(seed)
        D = hard_shrink(torch.randn(9, 12, generator=g, dtype=torch.float64), 4)
        W = 3 * p.W[:, :1] @ torch.randn(1, 12, generator=g, dtype=torch.float64) + D
        out = low_rank_plus_sparse(W, p.C, rank=1, count=4, rounds=20, ridge=0.0)
        found += out.relative_error < 1e-3 and torch.equal(out.D != 0, D != 0)
    assert found >= 6


@pytest.mark.parametrize("method", ITERATIVE)
def test_sparse_factors_keep_their_counts_and_report_the_raw_error(method):
    p = problem("gaussian")
    start = low_rank(p.W, preconditioner(p.C, "rootcov", ridge=1e-9), rank=5)
    out = sparse_factors(p.W, start.B, start.A, p.C, counts=(30, 40), method=method)
    assert int((out.B != 0).sum()) <= 30 and int((out.A != 0).sum()) <= 40
    assert out.relative_error == pytest.approx(rms_error(p.X @ p.W.T, p.X @ (out.B @ out.A).T), rel=1e-6)
    cut = hard_shrink(start.B, 30) @ hard_shrink(start.A, 40)
    assert out.relative_error < rms_error(p.X @ p.W.T, p.X @ cut.T)
    assert out.relative_error > start.relative_error


def test_sparse_factors_with_all_entries_stay_optimal():
    p = problem("gaussian")
    start = low_rank(p.W, preconditioner(p.C, "rootcov", ridge=0.0), rank=5)
    out = sparse_factors(p.W, start.B, start.A, p.C, counts=(45, 60))
    assert out.relative_error == pytest.approx(start.relative_error, rel=1e-6)


def test_bytes_of_sparse_storage():
    assert sparse_bytes(64, 64, 100, index="mask") == 100 * 2 + 64 * 64 // 8
    assert sparse_bytes(64, 64, 100, index="index") == 100 * 2 + 150  # 12 bits each
    assert sparse_bytes(64, 64, 100) == 350 and sparse_bytes(64, 64, 4000) == 8000 + 512
    assert sparse_bytes(64, 64, 3, value_bits=4, index="index") == 6


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda p: sparse(p.W, p.C, count=109), r"count of D must be in \[0, 108\], got 109"),
        (lambda p: sparse(p.W, p.C, count=1, method="hart"), "unknown method 'hart'; available: diagonal, hard"),
        (lambda p: sparse(p.W, p.C, count=1, iterations=0), "must be >= 1, got 0"),
        (lambda p: sparse(p.W, p.C[:3, :3], count=1), r"C must be \(12, 12\), got \(3, 3\)"),
        (lambda p: sparse(p.W, 0 * p.C, count=1), "C has no energy"),
        (lambda p: sparse(p.W / 0, p.C, count=1), "W must be a finite"),
        (lambda p: fista(p.W, p.C, penalty=0.0), r"penalty must be in \(0, 1\], got 0"),
        (lambda p: sparse_factors(p.W, p.W, torch.eye(12), p.C, counts=(1, 145)), r"count of A must be in \[0, 144\]"),
        (lambda p: sparse_factors(p.W, p.W, p.C, p.C, counts=(1, 1), method="diagonal"), "no diagonal form"),
        (lambda p: sparse_bytes(2, 2, 5), r"count must be in \[0, 4\], got 5"),
        (lambda p: sparse_bytes(2, 2, 1, index="csr"), "index must be 'mask', 'index' or 'auto', got 'csr'"),
    ],
)
def test_errors_say_what_to_fix(call, message):
    with pytest.raises(ValueError, match=message):
        call(problem("gaussian"))
