"""Pre-conditioners against the formulas of Table 1. CPU, no network."""

import pytest
import torch
from problems import KINDS, problem

from rankfold.linalg.lowrank import low_rank
from rankfold.linalg.preconditioner import PRECONDITIONERS, preconditioner

EYE = torch.eye(12, dtype=torch.float64)


def made(p, kind, ridge=1e-12):
    return preconditioner(p.C, kind, ridge=ridge, mean_abs=p.mean_abs)


def dense(P):
    """``E``, by what it does to the identity."""
    return P.apply(torch.eye(P.width, dtype=P.dtype))


def test_every_kind_is_the_formula_of_table_1():
    p, lam = problem("gaussian"), 0.1
    damped = p.C + lam * p.C.diagonal().mean() * EYE
    expected = {  # P P^T
        "identity": EYE,
        "hessian": torch.diag(1 / torch.linalg.inv(damped).diagonal()),
        "l1": torch.diag(p.X.abs().mean(0) ** 1.4),
        "l2": torch.diag((p.X**2).mean(0)),
        "covariance": damped @ damped,
        "rootcov": damped,
    }
    assert set(expected) == set(PRECONDITIONERS)
    for kind, metric in expected.items():
        P = preconditioner(p.C, kind, ridge=lam, alpha=0.7, mean_abs=p.mean_abs)
        E = dense(P)
        torch.testing.assert_close(E @ E.T * P.scale**2, metric)
        assert (E @ E.T).trace().item() == pytest.approx(12)
        torch.testing.assert_close(P.gram(p.W) * P.scale**2, p.W @ metric @ p.W.T)
        torch.testing.assert_close(P.undo(p.W), p.W @ torch.linalg.inv(E))
        torch.testing.assert_close(P.solve(p.W) / P.scale**2, p.W @ torch.linalg.inv(metric))
        assert not P.singular and not P.clamped


@pytest.mark.parametrize("kind", PRECONDITIONERS)
def test_inverse_is_the_pseudo_inverse(kind):
    p = problem("low_rank")
    P = made(p, kind, ridge=1e-2 if kind == "hessian" else 0.0)
    E = dense(P)
    torch.testing.assert_close(P.undo(EYE), torch.linalg.pinv(E, rtol=1e-7), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(P.solve(EYE), torch.linalg.pinv(E @ E.T, rtol=1e-12), rtol=1e-4, atol=1e-4)
    assert P.singular == (kind in ("covariance", "rootcov"))


@pytest.mark.parametrize("kind", ["covariance", "rootcov"])
def test_what_counts_as_lost_is_relative_to_the_largest_direction(kind):
    """A massive direction decides what is rounding; the second largest would not."""
    P = preconditioner(torch.diag(torch.tensor([1e-14, 1e-3, 1.0, 1e4], dtype=torch.float64)), kind, ridge=0.0)
    assert P.singular
    E, eye = dense(P), torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(P.undo(eye), torch.linalg.pinv(E, rtol=None if kind == "covariance" else 1e-7))


@pytest.mark.parametrize("kind", KINDS)
def test_the_factor_of_a_root_covariance_is_triangular_unless_it_has_to_be_clamped(kind):
    p = problem(kind)
    E = dense(made(p, "rootcov", ridge=1e-4))
    assert torch.equal(E, E.tril())


def test_an_indefinite_moment_is_clamped_and_says_so():
    p = problem("gaussian")
    values, U = torch.linalg.eigh(p.C)
    values[0] = -1e-6 * values[-1]
    C = (U * values) @ U.T
    C = (C + C.T) / 2
    P = preconditioner(C, "rootcov", ridge=1e-9)
    assert not P.clamped  # nobody has asked for a factor yet
    E = dense(P)
    assert P.clamped and not P.singular
    lam = 1e-9 * C.diagonal().mean()
    expected = (U * (values.clamp_min(0) + lam)) @ U.T
    torch.testing.assert_close(E @ E.T * P.scale**2, expected, rtol=1e-9, atol=1e-9 * values[-1].item())


def test_the_moment_stays_as_it_is():
    p = problem("gaussian")
    before = p.C.clone()
    for kind in PRECONDITIONERS:
        P = made(p, kind, ridge=1e-3)
        P.apply(p.W), P.gram(p.W), P.undo(p.W), P.solve(p.W)
    assert torch.equal(p.C, before)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda p: preconditioner(p.C, "rootcow", ridge=0.0), "unknown pre-conditioner 'rootcow'; available: identity"),
        (lambda p: preconditioner(p.C, "l1", ridge=0.0), "needs mean_abs"),
        (lambda p: preconditioner(p.C, "l1", ridge=0.0, mean_abs=-p.mean_abs), "mean_abs must be"),
        (lambda p: preconditioner(p.C, "l1", ridge=0.0, mean_abs=p.mean_abs, alpha=0.0), "alpha must be > 0, got 0"),
        (lambda p: preconditioner(p.C, "rootcov", ridge=-1.0), "ridge must be >= 0, got -1"),
        (lambda p: preconditioner(p.C / 0, "l2", ridge=1.0), "non-finite"),
        (lambda p: preconditioner(p.C[:3], "l2", ridge=1.0), r"C must be \(12, 12\), got \(3, 12\)"),
    ],
)
def test_errors_say_what_to_fix(call, message):
    with pytest.raises(ValueError, match=message):
        call(problem("gaussian"))


def test_hessian_of_a_singular_moment_is_refused_with_a_remedy():
    with pytest.raises(torch.linalg.LinAlgError, match=r"rank 5 of 12.*raise the ridge"):
        preconditioner(problem("low_rank").C, "hessian", ridge=0.0)


@pytest.mark.parametrize("kind", PRECONDITIONERS)
def test_an_input_that_is_always_zero_leaves_the_weight_to_decide(kind):
    p = problem("gaussian")
    ours = low_rank(p.W, preconditioner(0 * p.C, kind, ridge=1e-4, mean_abs=0 * p.C.diagonal()), rank=3)
    plain = low_rank(p.W, preconditioner(p.C, "identity", ridge=0.0), rank=3)
    torch.testing.assert_close(ours.B @ ours.A, plain.B @ plain.A)
