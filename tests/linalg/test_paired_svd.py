"""Type III against the SVD in model dimension (Theorem 3), the raw inputs, and rivals of the same rank."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modegpt_problems import value_output
from problems import KINDS

from rankfold.linalg.paired_svd import PairedSVD, paired_factors
from rankfold.linalg.psd import psd_root

F64 = torch.float64


def paired_svd(A, B, *, rank: int) -> PairedSVD:
    return paired_factors(A, B).truncated(rank)


def fitted(p, rank, B=None):
    """New value and output projections of a group."""
    out = paired_svd(p.A, p.B if B is None else B, rank=rank)
    return out, out.down @ p.W_v, p.W_o @ out.up


@pytest.mark.parametrize("rank", [1, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_one_head_is_theorem_3_in_model_dimension(kind, rank):
    """Paper: ``U S V = svd(C^1/2 W_v^T W_o^T)``, d x d; ``W_v' = (C^-1/2 U_k)^T``, ``W_o' = (S V)^T``."""
    p = value_output(kind)
    root = psd_root(p.C)
    U, S, V = torch.linalg.svd(root.root @ p.W_v.T @ p.W_o[0].T)
    out, new_v, new_o = fitted(p, rank)
    torch.testing.assert_close(out.singular_values, S[:6], rtol=1e-6, atol=1e-7 * S[0].item())
    assert out.error == pytest.approx(S[rank:].square().sum().item(), rel=1e-6, abs=1e-12 * S[0].item() ** 2)
    paper = U[:, :rank] * S[:rank] @ V[:rank]  # C^1/2 W_v'^T W_o'^T
    ours = root.root @ new_v.T @ new_o[0].T
    torch.testing.assert_close(ours, paper, rtol=1e-5, atol=1e-6 * S[0].item())


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_group_is_the_svd_of_the_stacked_output_projections(kind, heads):
    p = value_output(kind, G=heads)
    S = torch.linalg.svdvals(p.W_o.flatten(0, 1) @ p.W_v @ psd_root(p.C).root)
    out, _, _ = fitted(p, 2)
    assert out.error == pytest.approx(S[2:].square().sum().item(), rel=1e-6, abs=1e-12 * S[0].item() ** 2)
    assert out.relative_error == pytest.approx((S[2:].norm() / S.norm()).item(), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("rank", [1, 4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_the_error_measured_on_the_raw_inputs(kind, rank, heads):
    p = value_output(kind, G=heads)
    out, new_v, new_o = fitted(p, rank)
    power = p.measured(0 * p.W_v, p.W_o)
    assert out.error == pytest.approx(p.measured(new_v, new_o), rel=1e-6, abs=1e-11 * power)
    assert out.relative_error == pytest.approx((p.measured(new_v, new_o) / power) ** 0.5, rel=1e-4, abs=1e-5)


def test_values_that_are_always_zero_need_nothing():
    out = paired_svd(torch.zeros(6, 6, dtype=F64), value_output("gaussian").B, rank=2)
    assert not out.down.any() and not out.up.any() and out.error == 0 and out.relative_error == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from([1, 3]), st.sampled_from([1e-3, 0.1, 3.0]))
def test_no_perturbed_pair_of_the_same_rank_does_better(seed, rank, heads, size):
    p = value_output("gaussian", G=heads, seed=seed % 30)
    g = torch.Generator().manual_seed(seed)
    out, _, _ = fitted(p, rank)
    down = out.down + size * out.down.norm() * torch.randn(out.down.shape, generator=g, dtype=F64)
    up = out.up + size * out.up.norm() * torch.randn(out.up.shape, generator=g, dtype=F64)
    assert out.error <= p.measured(down @ p.W_v, p.W_o @ up) * (1 + 1e-9)
    best_up = torch.linalg.lstsq(p.x @ (down @ p.W_v).T, p.x @ p.W_v.T).solution.T  # the best for this `down`
    assert out.error <= p.measured(down @ p.W_v, p.W_o @ best_up) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 500), st.integers(1, 5), st.integers(1, 4), st.sampled_from(["gaussian", "outlier", "low_rank"]))
def test_joint_form_of_a_group_is_never_worse_than_the_papers(seed, rank, heads, kind):
    p = value_output(kind, G=heads, seed=seed)
    joint, v, o = fitted(p, rank)
    _, paper_v, paper_o = fitted(p, rank, B=torch.eye(6, dtype=F64))
    power = p.measured(0 * p.W_v, p.W_o)
    assert p.measured(v, o) <= p.measured(paper_v, paper_o) * (1 + 1e-9) + 1e-11 * power
    assert joint.error <= p.measured(paper_v, paper_o) * (1 + 1e-9) + 1e-11 * power


def test_joint_form_is_much_better_where_the_outputs_ignore_what_is_loud():
    p = value_output("gaussian", G=2)
    p = p._replace(W_o=p.W_o * torch.tensor([1e-3, 1, 1, 1, 1, 1], dtype=F64))
    p = p._replace(W_v=p.W_v * torch.tensor([1e3, 1, 1, 1, 1, 1], dtype=F64)[:, None])
    _, v, o = fitted(p, 3)
    _, paper_v, paper_o = fitted(p, 3, B=torch.eye(6, dtype=F64))
    assert p.measured(v, o) < 0.9 * p.measured(paper_v, paper_o)


@pytest.mark.parametrize("kind", KINDS)
def test_identity_metric_is_the_papers_grouped_form(kind):
    """App. B.1: the SVD of ``C^1/2 W_v^T`` alone."""
    p = value_output(kind, G=2)
    S = torch.linalg.svdvals(psd_root(p.C).root @ p.W_v.T)
    out = paired_svd(p.A, torch.eye(6, dtype=F64), rank=3)
    torch.testing.assert_close(out.singular_values, S, rtol=1e-6, atol=1e-7 * S[0].item())


def test_a_group_of_equal_heads_is_one_head():
    one = value_output("gaussian", G=1)
    many = one._replace(W_o=one.W_o.expand(4, -1, -1))
    a, b = fitted(one, 3)[0], fitted(many, 3)[0]
    torch.testing.assert_close(a.down, b.down, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(a.up, b.up, rtol=1e-6, atol=1e-9)
    assert b.error == pytest.approx(4 * a.error.item(), rel=1e-9)


@pytest.mark.parametrize("kind", ["gaussian", "outlier"])
def test_full_rank_changes_nothing(kind):
    p = value_output(kind, G=2)
    out, new_v, new_o = fitted(p, 6)
    torch.testing.assert_close(out.up @ out.down, torch.eye(6, dtype=F64), rtol=0, atol=1e-6)
    torch.testing.assert_close(new_o @ new_v, p.W_o @ p.W_v, rtol=1e-6, atol=1e-6)
    assert out.error == out.relative_error == 0.0


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_values_that_fill_few_dimensions_are_kept_without_error(rank):
    """``A`` of rank 3: nothing is divided by its zero eigenvalues, and from rank 3 on nothing is lost."""
    p = value_output("gaussian")
    basis = torch.randn(6, 3, generator=torch.Generator().manual_seed(5), dtype=F64)
    p = p._replace(W_v=basis @ p.W_v[:3])
    out, new_v, new_o = fitted(p, rank)
    power = p.measured(0 * p.W_v, p.W_o)
    assert torch.isfinite(out.down).all() and torch.isfinite(out.up).all()
    assert out.down.abs().max() < 1e4
    assert out.error == pytest.approx(p.measured(new_v, new_o), rel=1e-6, abs=1e-11 * power)
    assert (out.relative_error < 1e-6) == (rank >= 3)


def test_a_head_that_is_never_read_costs_nothing():
    p = value_output("gaussian")
    out = paired_svd(p.A, torch.zeros(6, 6, dtype=F64), rank=2)
    assert out.error == 0 and out.relative_error == 0
    assert torch.isfinite(out.down).all() and torch.isfinite(out.up).all()


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["gaussian", "outlier", "low_rank"]), st.floats(-12, 12), st.floats(-12, 12))
def test_scale_of_the_moments_does_not_matter(kind, a, b):
    p = value_output(kind)
    base, scaled = paired_svd(p.A, p.B, rank=3), paired_svd(10**a * p.A, 10**b * p.B, rank=3)
    product = base.up @ base.down
    torch.testing.assert_close(scaled.up @ scaled.down, product, rtol=1e-6, atol=1e-6 * product.abs().max().item())
    expected = 10 ** (a + b) * base.error.item()
    assert scaled.error == pytest.approx(expected, rel=1e-5, abs=1e-12 * expected)
    assert scaled.relative_error == pytest.approx(base.relative_error.item(), rel=1e-5, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 200), st.integers(1, 6))
def test_signs_are_fixed(seed, rank):
    p = value_output("gaussian", seed=seed)
    out = paired_svd(p.A, p.B, rank=rank)
    largest = out.down.gather(1, out.down.abs().argmax(1, keepdim=True))
    assert (largest > 0).all()
    flip = torch.diag(torch.tensor([1.0, -1, 1, -1, 1, -1], dtype=F64))  # other coordinates, the same problem
    other = paired_svd(flip @ p.A @ flip, flip @ p.B @ flip, rank=rank)
    torch.testing.assert_close(other.up @ other.down, flip @ out.up @ out.down @ flip, rtol=1e-6, atol=1e-7)


def test_result_is_deterministic_and_inputs_stay_untouched():
    p = value_output("outlier", G=2)
    A, B = p.A, p.B
    a, b = paired_svd(A, B, rank=3), paired_svd(A.clone(), B.clone(), rank=3)
    assert torch.equal(a.down, b.down) and torch.equal(a.up, b.up)
    assert torch.equal(A, p.A) and torch.equal(B, p.B)
    assert a.down.shape == (3, 6) and a.up.shape == (6, 3) and a.singular_values.shape == (6,)
    assert a.singular_values.diff().max() <= 0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 100), st.integers(2, 6))
def test_error_falls_with_the_rank(seed, rank):
    p = value_output("gaussian", seed=seed)
    assert paired_svd(p.A, p.B, rank=rank).error <= paired_svd(p.A, p.B, rank=rank - 1).error


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda A, B: paired_svd(A, B, rank=0), r"rank must be in \[1, 6\], got 0"),
        (lambda A, B: paired_svd(A, B, rank=7), r"rank must be in \[1, 6\], got 7"),
        (lambda A, B: paired_svd(A[:, :4], B, rank=1), r"A must be \(4, 4\), got \(6, 4\)"),
        (lambda A, B: paired_svd(A, B[:5, :5], rank=1), r"B must be \(6, 6\), got \(5, 5\)"),
        (lambda A, B: paired_svd(A / 0, B, rank=1), "^A has non-finite entries"),
        (lambda A, B: paired_svd(A, B / 0, rank=1), "^B has non-finite entries"),
    ],
)
def test_errors_say_what_to_fix(call, message):
    p = value_output("gaussian")
    with pytest.raises(ValueError, match=message):
        call(p.A, p.B)


def test_a_batch_of_heads_is_each_head_by_itself():
    problems = [value_output("gaussian", seed=seed) for seed in range(6)]
    A, B = (torch.stack([getattr(p, name) for p in problems]).unflatten(0, (2, 3)) for name in "AB")
    together = paired_svd(A, B, rank=3)
    for i, p in enumerate(problems):
        alone = paired_svd(p.A, p.B, rank=3)
        for ours, reference in zip(together, alone, strict=True):
            torch.testing.assert_close(ours.flatten(0, 1)[i], reference, rtol=1e-9, atol=1e-12)
