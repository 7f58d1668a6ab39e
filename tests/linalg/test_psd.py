"""Roots of moments against eigen-free references: squares, lstsq, numpy's pseudo-inverse."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import KINDS, activations

from rankfold.linalg import psd
from rankfold.linalg.psd import (
    WIDE,
    check_moment,
    choosing,
    damping,
    energy,
    metric_root,
    psd_root,
    quadratic,
    spd_factor,
    spd_inverse,
)


def moment(kind: str, seed: int = 0) -> torch.Tensor:
    X = activations(kind, 12, seed=seed)
    return X.T @ X / len(X)


@pytest.mark.parametrize("kind", KINDS)
def test_root_squares_to_the_moment_and_is_symmetric(kind):
    C = moment(kind)
    root = psd_root(C).root
    assert (root @ root - C).norm() <= 1e-13 * len(C) * C.norm()
    torch.testing.assert_close(root, root.T)


@pytest.mark.parametrize("kind", KINDS)
def test_root_is_the_positive_one(kind):
    root = psd_root(moment(kind)).root
    assert torch.linalg.eigvalsh(root).min() >= -1e-12 * root.norm()


@pytest.mark.parametrize("kind", ["gaussian", "low_rank", "outlier"])
def test_inverse_is_the_pseudo_inverse_of_the_root(kind):
    out = psd_root(moment(kind))
    reference = torch.from_numpy(np.linalg.pinv(out.root.numpy(), rcond=1e-7, hermitian=True))
    torch.testing.assert_close(out.inverse, reference, rtol=1e-6, atol=1e-7 * reference.abs().max().item())


@pytest.mark.parametrize(("kind", "rank"), [("gaussian", 12), ("low_rank", 5), ("outlier", 12)])
def test_rank_counts_the_directions_that_have_energy(kind, rank):
    out = psd_root(moment(kind))
    assert out.rank == rank
    assert torch.linalg.matrix_rank(out.inverse, hermitian=True, rtol=1e-10) == rank


def test_root_times_inverse_projects_on_the_span_of_the_data():
    X = activations("low_rank", 12)
    out = psd_root(X.T @ X)
    projector = out.root @ out.inverse
    basis = torch.linalg.qr(X.T[:, :5]).Q  # 5 tokens span what all of them span
    torch.testing.assert_close(projector, basis @ basis.T, rtol=0, atol=1e-6)


def test_eigenvalues_ascend_and_are_clamped():
    C = torch.diag(torch.tensor([3.0, -1e-9, 1.0], dtype=torch.float64))
    out = psd_root(C)
    torch.testing.assert_close(out.eigenvalues, torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64))
    assert out.rank == 2 and torch.isfinite(out.root).all() and out.inverse[1, 1] == 0


def test_zero_moment_has_zero_root_and_zero_inverse():
    out = psd_root(torch.zeros(3, 3))
    assert out.rank == 0 and not out.root.any() and not out.inverse.any()


def test_ridge_is_relative_to_the_mean_diagonal():
    C = moment("gaussian")
    damped = C + 0.1 * C.diagonal().mean() * torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(psd_root(C, ridge=0.1).root, psd_root(damped).root)
    torch.testing.assert_close(psd_root(C, ridge=0.1).inverse, psd_root(damped).inverse)


def test_ridge_makes_a_singular_moment_invertible():
    out = psd_root(moment("low_rank"), ridge=1e-3)
    assert out.rank == 12
    torch.testing.assert_close(out.root @ out.inverse, torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(KINDS), st.floats(-20, 20), st.floats(0, 1))
def test_scaling_the_moment_scales_the_root(kind, exponent, ridge):
    C, scale = moment(kind), 10.0**exponent
    a, b = psd_root(C, ridge=ridge, cutoff=1e-10), psd_root(scale * C, ridge=ridge, cutoff=1e-10)
    torch.testing.assert_close(b.root, a.root * scale**0.5, rtol=1e-7, atol=1e-7 * scale**0.5 * a.root.norm().item())
    torch.testing.assert_close(b.inverse, a.inverse * scale**-0.5, rtol=1e-5, atol=1e-6 * b.inverse.norm().item())
    assert a.rank == b.rank


def test_precision_of_the_input_is_kept_and_the_input_stays_untouched():
    C = moment("gaussian").float()
    before = C.clone()
    out = psd_root(C, ridge=1e-3)
    assert {out.root.dtype, out.inverse.dtype, out.eigenvalues.dtype} == {torch.float32}
    assert torch.equal(C, before)


@pytest.mark.parametrize(
    ("C", "message"),
    [
        (torch.ones(3, 4), r"C must be \(4, 4\), got \(3, 4\)"),
        (torch.full((2, 2), float("nan")), "C has non-finite entries; were the activations accumulated in fp16"),
        (torch.full((2, 2), float("inf")), "C has non-finite entries"),
    ],
)
def test_errors_say_what_to_fix(C, message):
    with pytest.raises(ValueError, match=message):
        psd_root(C)


def test_check_moment_names_what_it_was_given():
    check_moment(torch.eye(3), 3)
    with pytest.raises(ValueError, match=r"^A must be \(4, 4\), got \(3, 3\)$"):
        check_moment(torch.eye(3), 4, name="A")
    with pytest.raises(ValueError, match=r"^B has non-finite entries"):
        check_moment(torch.eye(2) / 0, 2, name="B")


@pytest.mark.parametrize("rows", [1, 4, 9, 512])
def test_a_quadratic_form_by_rows_is_the_product(rows, monkeypatch):
    W = torch.randn(9, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    C = moment("gaussian")
    monkeypatch.setattr(psd, "ROWS", rows)
    K = quadratic(W, C)
    torch.testing.assert_close(K, W @ C @ W.T)
    assert torch.equal(K, K.T)


def test_damping_is_relative_and_never_negative():
    C = torch.diag(torch.tensor([1.0, 2.0, 6.0]))
    assert damping(C, 0.5) == pytest.approx(1.5) and damping(10 * C, 0.5) == pytest.approx(15)
    assert damping(-C, 0.5) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("N", [1, 2, 7, 64, 130])
def test_spd_inverse_is_the_inverse(N, dtype):
    x = torch.randn(3 * N, N, generator=torch.Generator().manual_seed(N), dtype=torch.float64)
    A = (x.T @ x / (3 * N) + 0.1 * torch.eye(N)).to(dtype)
    before, expected = A.clone(), np.linalg.inv(A.double().numpy())
    ours = spd_inverse(A)
    assert ours.dtype == dtype and ours.shape == (N, N) and torch.equal(A, before)
    np.testing.assert_allclose(
        ours.double().numpy(), expected, rtol=0, atol=200 * torch.finfo(dtype).eps * abs(expected).max()
    )


@pytest.mark.parametrize("A", [torch.zeros(3, 3), -torch.eye(4), torch.tensor([[1.0, 2.0], [2.0, 1.0]])])
def test_spd_inverse_says_where_there_is_none(A):
    assert spd_inverse(A) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_root_gives_lengths_in_the_damped_metric(kind):
    G = moment(kind)
    R, y = metric_root(G, ridge=0.1), torch.randn(12, 7, dtype=G.dtype, generator=torch.Generator().manual_seed(0))
    lengths = (y * (G @ y)).sum(0) + 0.1 * G.diagonal().mean() * y.square().sum(0)
    torch.testing.assert_close((R @ y).square().sum(0), lengths)
    torch.testing.assert_close(metric_root(1e9 * G, ridge=0.1), 1e9**0.5 * R)


def test_a_metric_of_nothing_weighs_all_alike_and_one_that_is_no_metric_is_refused():
    assert torch.equal(metric_root(torch.zeros(3, 3), ridge=0.1), torch.eye(3))
    with pytest.raises(ValueError, match="G has non-finite entries"):
        metric_root(torch.full((2, 2), torch.nan), ridge=0.1)
    with pytest.raises(torch.linalg.LinAlgError, match=r"the output metric \(2, 2\) is not positive definite"):
        metric_root(torch.tensor([[1.0, 3.0], [3.0, 1.0]]), ridge=0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_factor_solves_as_a_dense_inverse_does(dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 21, generator=g, dtype=torch.float64)
    A, B = x.T @ x / 60, torch.randn(21, 5, generator=g, dtype=torch.float64).to(dtype)
    L = torch.linalg.cholesky(A + 0.5 * torch.eye(21, dtype=torch.float64))
    factor = spd_factor(A, shift=0.5, dtype=dtype)
    for ours, theirs in (
        (factor.forward(B), torch.linalg.inv(L) @ B.double()),
        (factor.backward(B), torch.linalg.inv(L).T @ B.double()),
        (factor.solve(B), torch.linalg.inv(L @ L.T) @ B.double()),
    ):
        assert ours.dtype is dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5 if dtype is torch.float32 else 1e-12)
    assert spd_factor(A, shift=-100.0) is None


@pytest.mark.parametrize("N", [3, 512, 513, 1100])
def test_energy_is_the_trace_of_the_quadratic_form(N):
    """By panels of the upper triangle, whose number and last size differ."""
    g = torch.Generator().manual_seed(0)
    x, W = (torch.randn(rows, N, generator=g, dtype=torch.float64) for rows in (40, 6))
    C = x.T @ x
    expected = torch.einsum("oi,ij,oj->", W, C, W).item()
    assert energy(W, C).item() == pytest.approx(expected, rel=1e-12)
    assert (
        energy(W.float(), C).item() == pytest.approx(expected, rel=1e-4) and energy(W.float(), C).dtype is torch.float64
    )


def test_only_wide_moments_are_compared_in_fp32():
    for N, dtype in ((WIDE - 1, torch.float64), (WIDE, torch.float32)):
        assert choosing(torch.zeros(1, dtype=torch.float64).expand(N, N)) is dtype
