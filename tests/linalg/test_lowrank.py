"""Low-rank factors against truncated SVDs and least squares of the raw activations. CPU, no network."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import KINDS, Problem, activations, problem, rms_error

from rankfold.linalg import lowrank
from rankfold.linalg.lowrank import bias_update, low_rank, metric_error
from rankfold.linalg.preconditioner import PRECONDITIONERS, preconditioner


def precond(p, kind="rootcov", ridge=1e-12):
    return preconditioner(p.C, kind, ridge=ridge, mean_abs=p.mean_abs)


@pytest.mark.parametrize("rank", [1, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_rootcov_reaches_the_best_rank_r_approximation_of_the_raw_outputs(kind, rank):
    p = problem(kind)
    out = low_rank(p.W, precond(p), rank=rank, C=p.C)
    Y = p.X @ p.W.T
    best = torch.linalg.svdvals(Y)[rank:].norm() / Y.norm()  # Eckart-Young on the outputs
    assert out.relative_error == pytest.approx(best.item(), rel=1e-4, abs=1e-6)
    assert rms_error(Y, p.X @ out.A.T @ out.B.T) == pytest.approx(best.item(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rootcov_has_the_smallest_activation_error_of_all_six(kind):
    p = problem(kind)
    error = {k: low_rank(p.W, precond(p, k, 1e-9), rank=3, C=p.C).relative_error for k in PRECONDITIONERS}
    others = [e for k, e in error.items() if k != "rootcov"]
    assert error["rootcov"] <= min(others) * (1 + 1e-6)
    assert error["rootcov"] < error["identity"] * 0.999  # and the choice matters


@pytest.mark.parametrize("kind", PRECONDITIONERS)
def test_factors_are_the_papers_for_an_invertible_preconditioner(kind):
    p = problem("gaussian")
    P = precond(p, kind)
    M = P.apply(torch.eye(12, dtype=torch.float64))
    U, S, V = torch.linalg.svd(p.W @ M, full_matrices=False)
    paper = U[:, :4] * S[:4] @ V[:4] @ torch.linalg.inv(M)  # Eq. 3
    out = low_rank(p.W, P, rank=4)
    torch.testing.assert_close(out.B @ out.A, paper)
    torch.testing.assert_close(out.B.norm(dim=0), S[:4])  # J = I: singular values in B


def svd_form(p, P, rank):
    """Eq. 3 by an SVD of W P and products with the error of the raw outputs: nothing is squared."""
    U = torch.linalg.svd(P.apply(p.W), full_matrices=False).U[:, :rank]
    product = U @ (U.T @ p.W)
    return product, rms_error(p.X @ p.W.T, p.X @ product.T)


@pytest.mark.parametrize("shape", [(40, 40), (24, 60), (60, 24)])
@pytest.mark.parametrize("kind", ["gaussian", "outlier", "ill_conditioned"])
def test_squaring_loses_nothing_that_shows(kind, shape):
    out, width = shape
    X = activations(kind, width, tokens=400)
    W = torch.randn(out, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p = Problem(X, W, X.T @ X / len(X), X.mean(0), W[:, 0])
    P = preconditioner(p.C, "rootcov", ridge=1e-8)
    for rank in (1, 10, 23):
        ours = low_rank(W, P, rank=rank, C=p.C)
        product, error = svd_form(p, P, rank)
        assert ours.relative_error == pytest.approx(error, rel=1e-7, abs=1e-9)
        gap = metric_error(ours.B @ ours.A - product, W, p.C)
        assert gap < 1e-6, (kind, shape, rank)
        torch.testing.assert_close(ours.B @ ours.A, product, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", PRECONDITIONERS)
@pytest.mark.parametrize("shape", ["gaussian", "wide", "tall"])
def test_error_is_that_of_the_product_in_any_metric(shape, kind):
    p = problem(shape)
    P = precond(p, kind, 1e-3)
    for rank in range(1, min(p.W.shape) + 1):
        for C in (p.C, p.Sigma, p.C.clone()):  # the moment P is made of, others, and an equal one that is not the same
            out = low_rank(p.W, P, rank=rank, C=C)
            assert out.relative_error == pytest.approx(metric_error(p.W - out.B @ out.A, p.W, C), rel=1e-6, abs=3e-8)
        gap, whole = P.apply(p.W - out.B @ out.A), P.apply(p.W)
        own = low_rank(p.W, P, rank=rank).relative_error
        assert own == pytest.approx((gap.norm() / whole.norm()).item(), rel=1e-6, abs=3e-8)


@pytest.mark.parametrize("shape", ["gaussian", "tall"])
def test_an_indefinite_moment_gives_what_its_clamped_one_gives(shape):
    """Sums in fp32 put the smallest eigenvalues below zero by more than a small ridge."""
    p = problem(shape)
    values, U = torch.linalg.eigh(p.C)
    values[:2] = torch.tensor([-1e-7, 0.0]) * values[-1]
    broken, clamped = ((U * v) @ U.T for v in (values, values.clamp_min(0)))
    a, b = (preconditioner((C + C.T) / 2, "rootcov", ridge=1e-9) for C in (broken, clamped))
    ours, reference = low_rank(p.W, a, rank=3), low_rank(p.W, b, rank=3)
    torch.testing.assert_close(ours.B @ ours.A, reference.B @ reference.A, rtol=1e-4, atol=1e-4)
    assert ours.relative_error == pytest.approx(reference.relative_error, rel=1e-4)
    assert a.clamped == (shape == "tall")  # where no factor is needed, nothing has to be clamped


def test_a_singular_preconditioner_keeps_what_it_cannot_see():
    p = problem("tall")
    blind = torch.diag(torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    P = preconditioner(blind, "rootcov", ridge=0.0)
    out = low_rank(p.W, P, rank=5, C=p.C)
    assert P.singular and out.relative_error < 1
    U = torch.linalg.svd(p.W[:, :3] * blind.diagonal()[:3].sqrt(), full_matrices=False).U
    seen = U @ (U.T @ p.W)  # the three directions that matter are exact, on all inputs
    torch.testing.assert_close((U.T @ out.B) @ out.A, U.T @ seen)


def test_a_rank_deficient_weight_gives_finite_factors():
    p = problem("gaussian")
    W = p.W[:, :2] @ p.W[:2]
    W[4:] = 0
    for weight in (W, 0 * W):
        out = low_rank(weight, precond(p), rank=6, C=p.C)
        assert torch.isfinite(out.B).all() and torch.isfinite(out.A).all() and out.relative_error < 1e-6
        torch.testing.assert_close(out.B @ out.A, weight)


def test_signs_are_fixed():
    p = problem("gaussian")
    B = low_rank(p.W, precond(p), rank=6).B
    assert (B.gather(0, B.abs().argmax(0, keepdim=True)) > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_full_rank_gives_the_weight_back(kind):
    p = problem(kind)
    ridge = 1e-6 if kind == "low_rank" else 0.0
    out = low_rank(p.W, precond(p, ridge=ridge), rank=min(p.W.shape), C=p.C)
    torch.testing.assert_close(out.B @ out.A, p.W, rtol=1e-6, atol=1e-6)
    assert out.relative_error < 1e-7


def test_weights_survive_outside_the_span_of_the_calibration_data():
    p = problem("low_rank")  # 5 of 12 dims, no damping: V P^+ would lose the rest
    out = low_rank(p.W, precond(p, ridge=0.0), rank=9)
    torch.testing.assert_close(out.B @ out.A, p.W, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", PRECONDITIONERS)
def test_scale_of_the_statistics_does_not_matter(kind):
    p, scale = problem("outlier"), 2.0**10  # a power of two: the outlier makes the roundings of others show
    a = low_rank(p.W, preconditioner(p.C, kind, ridge=1e-3, mean_abs=p.mean_abs), rank=4)
    b = low_rank(p.W, preconditioner(scale**2 * p.C, kind, ridge=1e-3, mean_abs=scale * p.mean_abs), rank=4)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("rank", [2, 9])
def test_bias_update_is_least_squares_on_the_raw_activations(rank):
    p = problem("gaussian")
    P = preconditioner(p.Sigma, "rootcov", ridge=0.0)
    out = low_rank(p.W, P, rank=rank)
    bias = bias_update(p.W, (out.B, out.A), p.mean, p.bias)
    Y = p.X @ p.W.T + p.bias
    rest = Y - p.X @ out.A.T @ out.B.T
    reference = torch.linalg.lstsq(torch.ones(len(p.X), 1, dtype=torch.float64), rest).solution[0]
    torch.testing.assert_close(bias, reference)
    centred = Y - Y.mean(0)
    best = torch.linalg.svdvals(centred)[rank:].norm()  # best rank-r plus constant
    assert (rest - bias).norm().item() == pytest.approx(best.item(), rel=1e-6, abs=1e-8)


def test_an_error_of_outputs_that_do_not_vary_is_relative_to_their_mean():
    W, still = torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    mean, shift = torch.tensor([30.0, 40.0]).double(), torch.tensor([3e-7, 4e-7]).double()
    scale = 50 * torch.finfo(torch.float32).eps ** 0.5  # what the variance of fp32 sums cannot tell from zero
    assert metric_error(W, W, still, shift=shift, mean=mean) == pytest.approx(5e-7 / scale)
    assert metric_error(W, W, still, shift=0 * shift, mean=0 * mean) == 0.0
    varied = torch.eye(2, dtype=torch.float64)  # here the mean plays no part
    assert metric_error(0 * W, W, varied, shift=shift, mean=mean) == metric_error(0 * W, W, varied, shift=shift)


@pytest.mark.parametrize("rows", [1, 4, 512])
def test_metric_error_is_that_of_the_raw_outputs(rows, monkeypatch):
    p = problem("gaussian")
    monkeypatch.setattr(lowrank, "ROWS", rows)
    gap, Y = torch.randn(9, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64), p.X @ p.W.T
    assert metric_error(gap, p.W, p.C) == pytest.approx(rms_error(Y, Y + p.X @ gap.T), rel=1e-9)
    moved, centred = p.X @ gap.T + p.bias, Y - Y.mean(0)
    found = metric_error(gap, p.W, p.Sigma, shift=gap @ p.mean + p.bias)
    assert found == pytest.approx((moved.norm() / centred.norm()).item(), rel=1e-9)


def test_covariance_and_bias_beat_the_second_moment_without():
    p = problem("gaussian")
    Y = p.X @ p.W.T
    plain = low_rank(p.W, preconditioner(p.C, "rootcov", ridge=0.0), rank=3)
    moved = low_rank(p.W, preconditioner(p.Sigma, "rootcov", ridge=0.0), rank=3)
    bias = bias_update(p.W, (moved.B, moved.A), p.mean, None)
    assert rms_error(Y, p.X @ moved.A.T @ moved.B.T + bias) < 0.95 * rms_error(Y, p.X @ plain.A.T @ plain.B.T)


def test_output_keeps_the_weight_dtype_and_statistics_stay_untouched():
    p = problem("gaussian")
    before = p.C.clone()
    out = low_rank(p.W.bfloat16(), precond(p), rank=4, C=p.C)
    assert out.B.dtype == out.A.dtype == torch.bfloat16 and out.singular_values.dtype == torch.float64
    assert bias_update(p.W.bfloat16(), (out.B, out.A), p.mean, None).dtype == torch.bfloat16
    assert torch.equal(p.C, before)


@pytest.mark.parametrize("kind", ["gaussian", "low_rank", "wide", "tall"])
def test_fp32_statistics_are_enough_for_ordinary_layers(kind):
    p = problem(kind)
    P = preconditioner(p.C.float(), "rootcov", ridge=1e-4)
    short, long = low_rank(p.W, P, rank=4, C=p.C), low_rank(p.W, precond(p, ridge=1e-4), rank=4, C=p.C)
    assert P.dtype == torch.float32 and short.B.dtype == torch.float64
    assert short.relative_error == pytest.approx(long.relative_error, rel=1e-3, abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_no_other_factors_of_the_same_rank_do_better(seed, rank):
    p = problem("wide", seed=seed % 50)
    g = torch.Generator().manual_seed(seed)
    ours = low_rank(p.W, precond(p, ridge=0.0), rank=rank, C=p.C)
    B = ours.B + 0.1 * torch.randn(ours.B.shape, generator=g, dtype=torch.float64)
    A = torch.linalg.lstsq(B, p.W).solution  # a rival that is also well fitted
    Y = p.X @ p.W.T
    assert ours.relative_error <= rms_error(Y, p.X @ A.T @ B.T) + 1e-12


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda p: low_rank(p.W, precond(p), rank=0), r"rank must be in \[1, 9\] for a \(9, 12\) weight, got 0"),
        (lambda p: low_rank(p.W, precond(p), rank=10), r"rank must be in \[1, 9\] .* got 10"),
        (lambda p: low_rank(p.W[:, :5], precond(p), rank=1), r"W must be \(out, 12\).*got \(9, 5\)"),
        (lambda p: low_rank(p.W / 0, precond(p), rank=1), "W has non-finite"),
        (lambda p: bias_update(p.W, (p.W, p.W), p.mean, None), "do not match"),
    ],
)
def test_errors_say_what_to_fix(call, message):
    with pytest.raises(ValueError, match=message):
        call(problem("gaussian"))
