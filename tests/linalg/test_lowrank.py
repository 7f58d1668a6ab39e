"""Low-rank factors against truncated SVDs and least squares of the raw activations. CPU, no network."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import KINDS, problem, rms_error

from rankfold.linalg.lowrank import PRECONDITIONERS, bias_update, centred_moment, error_curve, low_rank, preconditioner


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


def test_every_kind_is_the_formula_of_table_1():
    p, lam, eye = problem("gaussian"), 0.1, torch.eye(12, dtype=torch.float64)
    damped = p.C + lam * p.C.diagonal().mean() * eye
    expected = {
        "identity": torch.ones(12, dtype=torch.float64),
        "hessian": torch.linalg.inv(damped).diagonal() ** -0.5,
        "l1": p.X.abs().mean(0) ** 0.7,
        "l2": (p.X**2).mean(0).sqrt(),
        "covariance": damped,
    }
    for kind, matrix in expected.items():
        P = preconditioner(p.C, kind, ridge=lam, alpha=0.7, mean_abs=p.mean_abs)
        torch.testing.assert_close(P.matrix * P.scale, matrix)
        assert P.is_diagonal == (matrix.ndim == 1)
    root = preconditioner(p.C, "rootcov", ridge=lam)
    torch.testing.assert_close(root.matrix @ root.matrix * root.scale**2, damped)
    torch.testing.assert_close(root.matrix, root.matrix.T)


@pytest.mark.parametrize("kind", PRECONDITIONERS)
def test_inverse_is_the_pseudo_inverse(kind):
    p = problem("low_rank")
    P = precond(p, kind, ridge=1e-2 if kind == "hessian" else 0.0)
    M = torch.diag(P.matrix) if P.is_diagonal else P.matrix
    dense = torch.diag(P.inverse) if P.is_diagonal else P.inverse
    torch.testing.assert_close(dense, torch.linalg.pinv(M, rtol=1e-7), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", PRECONDITIONERS)
def test_factors_are_the_papers_for_an_invertible_preconditioner(kind):
    p = problem("gaussian")
    P = precond(p, kind)
    M = torch.diag(P.matrix) if P.is_diagonal else P.matrix
    U, S, V = torch.linalg.svd(p.W @ M, full_matrices=False)
    paper = U[:, :4] * S[:4] @ V[:4] @ torch.linalg.inv(M)  # Eq. 3
    out = low_rank(p.W, P, rank=4)
    torch.testing.assert_close(out.B @ out.A, paper)
    torch.testing.assert_close(out.B.norm(dim=0), S[:4])  # J = I: singular values in B


@pytest.mark.parametrize("kind", PRECONDITIONERS)
@pytest.mark.parametrize("shape", ["gaussian", "wide", "tall"])
def test_error_curve_is_the_error_at_every_rank(shape, kind):
    p = problem(shape)
    P = precond(p, kind)
    for C in (p.C, None):
        curve = error_curve(p.W, P, C=C)
        errors = [1.0] + [low_rank(p.W, P, rank=r, C=C).relative_error for r in range(1, len(curve))]
        torch.testing.assert_close(curve, torch.tensor(errors, dtype=torch.float64), rtol=1e-6, atol=1e-7)
        assert (curve.diff() <= 1e-12).all() and curve[-1] < 1e-7


def test_error_curve_counts_what_a_singular_preconditioner_cannot_see():
    p = problem("tall")
    blind = torch.diag(torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    P = preconditioner(blind, "rootcov", ridge=0.0)
    errors = [low_rank(p.W, P, rank=r, C=p.C).relative_error for r in (1, 3)]
    curve = error_curve(p.W, P, C=p.C)
    assert curve[[1, 3]].tolist() == pytest.approx(errors, rel=1e-6)
    assert errors[1] > 0.1


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
    p = problem("outlier")
    a = low_rank(p.W, preconditioner(p.C, kind, ridge=1e-3, mean_abs=p.mean_abs), rank=4)
    b = low_rank(p.W, preconditioner(1e6 * p.C, kind, ridge=1e-3, mean_abs=1e3 * p.mean_abs), rank=4)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("rank", [2, 9])
def test_bias_update_is_least_squares_on_the_raw_activations(rank):
    p = problem("gaussian")
    P = preconditioner(centred_moment(p.C, p.mean), "rootcov", ridge=0.0)
    out = low_rank(p.W, P, rank=rank)
    bias = bias_update(p.W, (out.B, out.A), p.mean, p.bias)
    Y = p.X @ p.W.T + p.bias
    rest = Y - p.X @ out.A.T @ out.B.T
    reference = torch.linalg.lstsq(torch.ones(len(p.X), 1, dtype=torch.float64), rest).solution[0]
    torch.testing.assert_close(bias, reference)
    centred = Y - Y.mean(0)
    best = torch.linalg.svdvals(centred)[rank:].norm()  # best rank-r plus constant
    assert (rest - bias).norm().item() == pytest.approx(best.item(), rel=1e-6, abs=1e-8)


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
    assert P.matrix.dtype == torch.float32 and short.B.dtype == torch.float64
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
        (lambda p: preconditioner(p.C, "rootcow", ridge=0.0), "did you mean 'rootcov'.*available: identity"),
        (lambda p: preconditioner(p.C, "l1", ridge=0.0), "needs mean_abs"),
        (lambda p: preconditioner(p.C, "l1", ridge=0.0, mean_abs=-p.mean_abs), "mean_abs must be"),
        (lambda p: preconditioner(p.C, "l1", ridge=0.0, mean_abs=p.mean_abs, alpha=0.0), "alpha must be > 0, got 0"),
        (lambda p: preconditioner(p.C, "rootcov", ridge=-1.0), "ridge must be >= 0, got -1"),
        (lambda p: preconditioner(0 * p.C, "l2", ridge=1.0), "C has no energy"),
        (lambda p: preconditioner(p.C / 0, "l2", ridge=1.0), "non-finite"),
        (lambda p: bias_update(p.W, (p.W, p.W), p.mean, None), "do not match"),
    ],
)
def test_errors_say_what_to_fix(call, message):
    with pytest.raises(ValueError, match=message):
        call(problem("gaussian"))


def test_hessian_of_a_singular_moment_is_refused_with_a_remedy():
    with pytest.raises(torch.linalg.LinAlgError, match=r"rank 5 of 12.*raise the ridge"):
        preconditioner(problem("low_rank").C, "hessian", ridge=0.0)
