"""Junctions: same product, fewer numbers. CPU, no network."""

import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import KINDS, heads, problem, rms_error

from rankfold.linalg.junction import JUNCTIONS, apply_junction, head_block_identity, stored_numbers
from rankfold.linalg.lowrank import low_rank
from rankfold.linalg.pivots import eliminate, pivot_columns
from rankfold.linalg.preconditioner import preconditioner


def factors(kind="gaussian", rank=4):
    p = problem(kind)
    out = low_rank(p.W, preconditioner(p.C, "rootcov", ridge=1e-8), rank=rank)
    return p, out.B, out.A


def reconstruct(junction):
    """Dense ``(O, N)`` product a junction stands for, by running it on the identity."""
    kind, B, A, columns, rows, _ = junction
    R, N = A.shape[0], A.shape[1] if kind != "block_identity_right" else A.shape[0] + A.shape[1]
    x = torch.eye(N, dtype=B.dtype, device=B.device)
    x = x if columns is None else x[columns]
    z = x[:R] + A @ x[R:] if kind == "block_identity_right" else A @ x
    y = torch.cat([z, B @ z]) if kind == "block_identity_left" else B @ z
    if rows is None:
        return y
    out = torch.empty_like(y)
    out[rows] = y
    return out


@pytest.mark.parametrize("junction", JUNCTIONS)
@pytest.mark.parametrize("rank", [1, 4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_every_junction_has_the_same_product(kind, rank, junction):
    _, B, A = factors(kind, rank)
    torch.testing.assert_close(reconstruct(apply_junction(B, A, junction)), B @ A, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("junction", JUNCTIONS)
def test_stored_numbers_are_those_that_are_neither_zero_nor_one_by_construction(junction):
    _, B, A = factors()
    out = apply_junction(B, A, junction)
    free = out.B.numel() + out.A.numel()
    if junction == "lu":
        free = int((out.B != 0).sum() + (out.A != 0).sum()) - 4  # less the unit diagonal
    assert free == stored_numbers(junction, 9, 12, 4)
    if "identity" in junction or junction == "lu":
        assert free == 4 * (9 + 12) - 16 < 9 * 12


def test_right_block_identity_runs_as_documented():
    p, B, A = factors()
    out, x = apply_junction(B, A, "block_identity_right"), p.X[0]
    perm, R = out.columns, 4
    assert sorted(perm.tolist()) == list(range(12)) and out.A.shape == (R, 12 - R)
    assert (perm[:R].diff() > 0).all() and (perm[R:].diff() > 0).all()  # ascending: cheap to gather
    torch.testing.assert_close(out.B @ (x[perm[:R]] + out.A @ x[perm[R:]]), B @ A @ x)
    torch.testing.assert_close(out.B, (B @ A)[:, perm[:R]])  # columns of the product: as large as the weight


def test_left_block_identity_runs_as_documented():
    p, B, A = factors()
    out, x = apply_junction(B, A, "block_identity_left"), p.X[0]
    z, y = out.A @ x, torch.zeros(9, dtype=torch.float64)
    assert out.B.shape == (9 - 4, 4)
    y[out.rows[:4]], y[out.rows[4:]] = z, out.B @ z
    torch.testing.assert_close(y, B @ A @ x)


def test_lu_is_triangular_and_bounded():
    p, B, A = factors()
    out, x = apply_junction(B, A, "lu"), p.X[0]
    assert torch.equal(out.B, out.B.tril()) and torch.equal(out.A, out.A.triu())
    assert torch.equal(out.B.diagonal(), torch.ones(4, dtype=torch.float64)) and out.B.abs().max() <= 1
    y = torch.zeros(9, dtype=torch.float64)
    y[out.rows] = out.B @ (out.A @ x[out.columns])
    torch.testing.assert_close(y, B @ A @ x)


def test_scales_of_the_dense_junctions():
    _, B, A = factors()
    right, symmetric = apply_junction(B, A, "right"), apply_junction(B, A, "symmetric")
    torch.testing.assert_close(right.B.norm(dim=0), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(symmetric.B.norm(dim=0), symmetric.A.norm(dim=1))
    assert torch.equal(apply_junction(B, A, "left").B, B)


@pytest.mark.parametrize("junction", JUNCTIONS)
@pytest.mark.parametrize("kind", ["gaussian", "outlier"])
def test_bf16_storage_is_safe(kind, junction):
    p, B, A = factors(kind, rank=5)
    out = apply_junction(B, A, junction)
    short = out._replace(B=out.B.bfloat16().double(), A=out.A.bfloat16().double())
    Y = p.X @ (B @ A).T
    assert rms_error(Y, p.X @ reconstruct(short).T) < 0.01  # bf16 rounds by up to 0.004


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_the_scale_and_order_in_which_rows_come_do_not_matter(seed):
    g = torch.Generator().manual_seed(seed)
    _, B, A = factors()
    J = (torch.rand(4, 4, generator=g, dtype=torch.float64).tril(-1)) + torch.diag(
        10.0 ** torch.arange(-4, 4, 2).double()
    )
    a = apply_junction(B, A, "block_identity_right")
    b = apply_junction(B @ torch.linalg.inv(J), J @ A, "block_identity_right")
    torch.testing.assert_close(a.columns, b.columns)
    torch.testing.assert_close(a.A, b.A, rtol=1e-5, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.sampled_from([1.0, 3.0, 30.0]))
def test_pivots_are_conditioned_nearly_as_well_as_those_of_pivoted_qr(seed, rank, heavy):
    g = torch.Generator().manual_seed(seed)
    M = torch.randn(40, rank, generator=g, dtype=torch.float64)
    Q = torch.linalg.qr(M * M.abs() ** (heavy - 1)).Q.T  # heavy tails: a few columns hold most of a row
    _, _, order = scipy.linalg.qr(Q.numpy(), pivoting=True)
    ours = pivot_columns(Q)
    assert len(set(ours.tolist())) == rank
    assert torch.linalg.cond(Q[:, ours]) <= 6 * torch.linalg.cond(Q[:, order[:rank].tolist()])


def test_the_first_pivots_of_a_random_choice_would_be_worse():
    Q = torch.linalg.qr(torch.randn(60, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q.T
    assert torch.linalg.cond(Q[:, pivot_columns(Q)]) < 0.3 * torch.linalg.cond(Q[:, :20])


def test_pivots_are_distinct_even_among_hopeless_candidates():
    Q = torch.eye(2, 4, dtype=torch.float64).roll(2, 1)  # only columns 2 and 3 are any good
    assert pivot_columns(Q).tolist() == [2, 3]
    assert len(set(pivot_columns(Q, 2).tolist())) == 2


def test_pivoting_repairs_a_singular_leading_block():
    _, B, A = factors()
    A = A.clone()
    A[:, 1] = A[:, 0]  # V_1 of Eq. 8 is singular (Remark 4)
    out = apply_junction(B, A, "block_identity_right")
    assert not {0, 1} <= set(out.columns[:4].tolist()) and out.condition < 100
    torch.testing.assert_close(reconstruct(out), B @ A)


@pytest.mark.parametrize("junction", [j for j in JUNCTIONS if j not in ("left", "right", "symmetric")])
def test_rank_deficient_factors_are_no_problem(junction):
    _, B, A = factors()
    A = A.clone()
    A[3] = A[0]
    torch.testing.assert_close(reconstruct(apply_junction(B, A, junction)), B @ A)


def test_a_square_block_is_as_well_conditioned_as_its_orthonormal_rows():
    Q = torch.linalg.qr(factors()[2]).Q
    X, condition = eliminate(Q, torch.arange(len(Q)), None, "that", "another")
    assert X.shape == (len(Q), 0) and condition == 1.0


def test_condition_is_that_of_the_inverted_block():
    _, B, A = factors()
    out = apply_junction(B, A, "block_identity_right")
    basis = scipy.linalg.orth(A.numpy().T).T[:, out.columns[:4].numpy()]
    sigma = scipy.linalg.svdvals(basis)
    assert out.condition == pytest.approx(sigma[0] / sigma[-1], rel=1e-8)
    assert torch.linalg.matrix_norm(out.A, 2).item() <= 1 / sigma[-1]


def test_an_ill_conditioned_block_is_refused_with_an_alternative():
    _, B, A = factors()
    with pytest.raises(torch.linalg.LinAlgError, match=r"'block_identity_left'.*condition number.*limit is 1.0e.*'lu'"):
        apply_junction(B, A, "block_identity_left", limit=1.0)
    with pytest.raises(torch.linalg.LinAlgError, match=r"key head 0.*condition number.*use no per-head junction"):
        head_block_identity(heads(2, 3, 5), heads(2, 3, 6), limit=1.0)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, r"1\.0e\+08"), (torch.float32, r"3\.0e\+03")])
def test_a_singular_block_is_refused(dtype, limit):
    Q, order = torch.eye(2, 4, dtype=dtype), torch.tensor([0, 2, 1, 3])
    message = f"^that: the 2 x 2 block has condition number inf, the limit is {limit}; use another"
    with pytest.raises(torch.linalg.LinAlgError, match=message):
        eliminate(Q, order, None, "that", "another")


@pytest.mark.parametrize("H, K", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_head_junction_keeps_every_logit(H, K, with_bias):
    h, r_q, r_k = 3, 5, 7
    B_q, B_k = heads(H, h, r_q), heads(K, h, r_k, seed=1)
    b_q, b_k = (heads(1, H, h, seed=2)[0], heads(1, K, h, seed=3)[0]) if with_bias else (None, None)
    out = head_block_identity(B_q, B_k, b_q=b_q, b_k=b_k)
    z_q, z_k = heads(1, 1, r_q, seed=4)[0, 0], heads(1, 1, r_k, seed=5)[0, 0]
    for i in range(H):
        g = i // (H // K)
        q, k = B_q[i] @ z_q, B_k[g] @ z_k
        p = out.order[g]
        new_q, new_k = out.B_q[i] @ z_q, z_k[p[:h]] + out.B_k2[g] @ z_k[p[h:]]
        if with_bias:
            q, k, new_q, new_k = q + b_q[i], k + b_k[g], new_q + out.b_q[i], new_k + out.b_k[g]
        torch.testing.assert_close(new_q @ new_k, q @ k)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda B, A: apply_junction(B, A, "block"), "unknown junction 'block'; available: left"),
        (lambda B, A: apply_junction(B, A[:3], "left"), r"must share r, got \(9, 4\) and \(3, 12\)"),
        (lambda B, A: apply_junction(A.T, B.T[:, :3], "left"), "rank 4 exceeds the smaller side"),
        (lambda B, A: apply_junction(B / 0, A, "left"), "non-finite"),
        (lambda B, A: stored_numbers("lu", 9, 12, 10), r"rank must be in \[1, 9\].*got 10"),
        (lambda B, A: stored_numbers("ul", 9, 12, 1), "unknown junction 'ul'"),
        (lambda B, A: head_block_identity(heads(2, 3, 5), heads(2, 3, 2)), "needs r_k >= 3.*got 2"),
        (lambda B, A: head_block_identity(heads(3, 3, 5), heads(2, 3, 4)), "3 query heads cannot share 2"),
    ],
)
def test_errors_say_what_to_fix(call, message):
    _, B, A = factors()
    with pytest.raises(ValueError, match=message):
        call(B, A)
