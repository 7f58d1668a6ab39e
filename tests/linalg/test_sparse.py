"""Sparse and low-rank plus sparse weights against brute force, KKT conditions and least squares. CPU, no network."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import KINDS, problem, rms_error

from rankfold.linalg.lowrank import low_rank
from rankfold.linalg.preconditioner import preconditioner
from rankfold.linalg.sparse import hard_shrink, low_rank_plus_sparse, soft_shrink, sparse

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
def test_a_ridge_is_as_many_more_inputs_on_the_axes(method):
    p, ridge = problem("gaussian"), 0.1
    lam = ridge * p.C.diagonal().mean() * len(p.X)
    X = torch.cat([p.X, lam.sqrt() * torch.eye(12, dtype=p.X.dtype)])
    out = sparse(p.W, p.C, count=25, method=method, ridge=ridge)
    torch.testing.assert_close(out.D, row_least_squares(X, p.W, out.D != 0), rtol=1e-4, atol=1e-5)
    assert out.relative_error == pytest.approx(rms_error(p.X @ p.W.T, p.X @ out.D.T), rel=1e-6)  # without the damping


@pytest.mark.parametrize("method", ["diagonal", *ITERATIVE])
def test_a_moment_that_rounding_made_indefinite_does_no_harm(method):
    p = problem("low_rank")
    null = torch.linalg.eigh(p.C).eigenvectors[:, 0]
    broken = p.C - 1e-6 * p.C.diagonal().mean() * torch.outer(null, null)
    for count in (30, 90):
        clean, found = (sparse(p.W, C, count=count, method=method) for C in (p.C, broken))
        assert rms_error(p.X @ p.W.T, p.X @ found.D.T) < clean.relative_error + 0.05


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


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 100), st.sampled_from(KINDS), st.integers(1, 4), st.integers(0, 30))
def test_low_rank_plus_sparse_never_gets_worse_and_beats_low_rank_alone(seed, kind, rank, count):
    p = problem(kind, seed=seed)
    out = low_rank_plus_sparse(p.W, p.C, rank=rank, count=count)
    alone = low_rank(p.W, preconditioner(p.C, "rootcov", ridge=1e-6), rank=rank).relative_error
    history = [alone, *out.loss_history]
    assert all(b <= a + 1e-7 for a, b in pairwise(history))
    assert int((out.D != 0).sum()) <= count and torch.linalg.matrix_rank(out.B @ out.A) <= rank


def test_low_rank_plus_sparse_is_the_best_of_its_rounds():
    p = problem("tall", seed=1)
    out = low_rank_plus_sparse(p.W, p.C, rank=4, count=30, method="diagonal", ridge=0.0)
    best = min(out.loss_history)
    assert out.loss_history[-1] > 1.1 * best and out.relative_error == best
    assert rms_error(p.X @ p.W.T, p.X @ (out.B @ out.A + out.D).T) == pytest.approx(best, rel=1e-6)


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


@pytest.mark.parametrize("method", ["diagonal", *ITERATIVE])
def test_an_input_that_is_always_zero_leaves_the_weight_to_decide(method):
    """Every result is exact then; what is kept is what would be kept for white inputs."""
    p, white = problem("gaussian"), torch.eye(12, dtype=torch.float64)
    out = sparse(p.W, 0 * p.C, count=30, method=method, ridge=1e-4)
    torch.testing.assert_close(out.D, sparse(p.W, white, count=30, method=method).D)
    both = low_rank_plus_sparse(p.W, 0 * p.C, rank=2, count=30, method=method)
    like = low_rank_plus_sparse(p.W, white, rank=2, count=30, method=method, ridge=0.0)
    torch.testing.assert_close(both.B @ both.A + both.D, like.B @ like.A + like.D)
    assert out.relative_error == both.relative_error == 0.0
    assert both.loss_history == pytest.approx(like.loss_history)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda p: sparse(p.W, p.C, count=109), r"count of D must be in \[0, 108\], got 109"),
        (lambda p: sparse(p.W, p.C, count=1, method="hart"), "unknown method 'hart'; available: diagonal, hard"),
        (lambda p: sparse(p.W, p.C, count=1, iterations=0), "must be >= 1, got 0"),
        (lambda p: sparse(p.W, p.C[:3, :3], count=1), r"C must be \(12, 12\), got \(3, 3\)"),
        (lambda p: sparse(p.W / 0, p.C, count=1), "W must be a finite"),
    ],
)
def test_errors_say_what_to_fix(call, message):
    with pytest.raises(ValueError, match=message):
        call(problem("gaussian"))
