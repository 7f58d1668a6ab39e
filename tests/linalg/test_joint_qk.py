"""Joint query-key compression against logits of raw tokens and tensorly's Tucker. CPU, no network."""

from itertools import pairwise

import pytest
import tensorly
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import activations, heads
from tensorly.decomposition import partial_tucker

from rankfold.linalg import pair_tucker as module
from rankfold.linalg.joint_qk import Affine, choose_ranks, joint_qk
from rankfold.linalg.pair_error import Pair, pair_error
from rankfold.linalg.pair_tucker import pair_tucker
from rankfold.linalg.preconditioner import preconditioner
from rankfold.linalg.rotations import rope_rotations

d, h, H = 12, 3, 4


def setup(kind="gaussian", K=4, *, biases=False, ridge=0.0):
    X = activations(kind, d, tokens=60)
    W_q, W_k = heads(H, h, d), heads(K, h, d, seed=7)
    C, mean = X.T @ X / len(X), X.mean(0)
    affine = None
    if biases:
        C = C - torch.outer(mean, mean)
        affine = Affine(mean, 3 * heads(1, H, h, seed=8)[0], 3 * heads(1, K, h, seed=9)[0])
    return X, W_q, W_k, preconditioner(C, "rootcov", ridge=ridge), affine


def project(X, W, b=None):
    return torch.einsum("nd,ihd->inh", X, W) + (0 if b is None else b[:, None])


def logits(X, W_q, W_k, affine=None, theta=None):
    """(D, H, N, N) logits of all pairs of tokens, written out."""
    q = project(X, W_q, affine and affine.b_q)
    k = project(X, W_k, affine and affine.b_k).repeat_interleave(len(W_q) // len(W_k), 0)
    theta = torch.eye(h, dtype=X.dtype)[None] if theta is None else theta
    return torch.einsum("imh,ohj,inj->oimn", q, theta, k)


def compressed_logits(X, out, theta=None):
    affine = None if out.b_q is None else Affine(None, out.b_q, out.b_k)
    return logits(X, out.B_q @ out.A_q, out.B_k @ out.A_k, affine, theta)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("K", [4, 2, 1])
@pytest.mark.parametrize("kind", ["gaussian", "outlier"])
def test_reported_error_is_that_of_the_raw_logits(kind, K, biases, rotary):
    X, W_q, W_k, P, affine = setup(kind, K, biases=biases)
    theta = rope_rotations(torch.tensor([0.7], dtype=torch.float64), h, window=2) if rotary else None
    out = joint_qk(W_q, W_k, P, ranks=(5, 3), affine=affine, rotations=theta)
    M = logits(X, W_q, W_k, affine, theta)
    error = (M - compressed_logits(X, out, theta)).norm() / M.norm()
    assert out.relative_error == pytest.approx(error.item(), rel=1e-6)


@pytest.mark.parametrize("ranks", [(2, 2), (5, 3), (3, 8)])
@pytest.mark.parametrize("kind", ["gaussian", "ill_conditioned", "low_rank"])
def test_reaches_the_error_of_tensorlys_tucker(kind, ranks):
    _, W_q, W_k, P, _ = setup(kind)
    tensorly.set_backend("pytorch")
    G = torch.stack([P.apply(q).T @ P.apply(k) for q, k in zip(W_q, W_k, strict=True)])  # (H, d, d), dense
    (core, planes), _ = partial_tucker(G, rank=list(ranks), modes=[1, 2], n_iter_max=200, tol=1e-12)
    reference = (G - torch.einsum("iab,ma,nb->imn", core, *planes)).norm() / G.norm()
    out = joint_qk(W_q, W_k, P, ranks=ranks, alternations=200)
    assert out.relative_error == pytest.approx(reference.item(), rel=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 6), st.booleans())
def test_loss_never_rises(seed, r_q, r_k, rotary):
    W_q, W_k = heads(H, h, d, seed=seed), heads(2, h, d, seed=seed + 1)
    theta = rope_rotations(torch.tensor([1.0]), h, window=3) if rotary else None
    history = joint_qk(W_q, W_k, setup()[3], ranks=(r_q, r_k), rotations=theta, alternations=6).loss_history
    assert 2 <= len(history) <= 6
    assert all(b <= a + 1e-9 for a, b in pairwise(history))


def test_alternations_end_when_the_error_has_settled():
    _, W_q, W_k, P, _ = setup()
    history = joint_qk(W_q, W_k, P, ranks=(3, 3), alternations=500).loss_history
    assert len(history) < 200
    gains = [(a - b) / b for a, b in pairwise(history)]
    assert gains[-1] <= 1e-6 and all(gain > 1e-6 for gain in gains[:-1])
    assert len(joint_qk(W_q, W_k, P, ranks=(3, 3), alternations=1).loss_history) == 1


@pytest.mark.parametrize("K", [4, 2])
def test_each_side_is_the_best_for_the_other_with_the_means(K):
    """Eq. 75 and 77 written out: the rows span the top eigenvectors of what the other side and its mean let through."""
    L, R = heads(H, h, d), heads(K, h, d, seed=7)
    means = 3 * heads(1, H, h, seed=8)[0], 3 * heads(1, K, h, seed=9)[0]
    A_l, A_r, _ = pair_tucker(L, R, ranks=(4, 3), means=means, alternations=500)
    wide, wide_mean = (x.repeat_interleave(H // K, 0) for x in (R, means[1]))
    for A, ours, other, mean, kept in ((A_l, L, wide, wide_mean, A_r), (A_r, wide, L, means[0], A_l)):
        through = torch.cat([other @ kept.T, mean[..., None]], 2)  # (H, h, r + 1)
        M = (ours.mT @ through @ through.mT @ ours).sum(0)
        best = torch.linalg.eigvalsh(M)[-len(A) :].sum()
        torch.testing.assert_close((A @ M @ A.T).trace(), best, rtol=1e-5, atol=0)


def test_top_is_the_svd_of_the_rows_from_either_side():
    for M in (heads(4, 3, 12), heads(2, 3, 12), heads(8, 3, 12)):
        S = M @ M.mT
        expected = torch.linalg.svd(module.weighted_rows(M, S), full_matrices=False).Vh[:5]
        found = module._top(M, S, 5)
        torch.testing.assert_close(found.T @ found, expected.T @ expected, rtol=1e-6, atol=1e-8)


def test_alternation_improves_on_its_start():
    _, W_q, W_k, P, _ = setup()
    history = joint_qk(W_q, W_k, P, ranks=(3, 3), alternations=8).loss_history
    assert history[-1] < history[0] - 1e-6


def test_joint_error_is_below_that_of_local_compression():
    X, W_q, W_k, P, _ = setup()
    out = joint_qk(W_q, W_k, P, ranks=(4, 4))
    U_q, U_k = (torch.linalg.svd(P.apply(W.flatten(0, 1)), full_matrices=False).U[:, :4] for W in (W_q, W_k))
    local = [(U @ U.T @ W.flatten(0, 1)).view(H, h, d) for U, W in ((U_q, W_q), (U_k, W_k))]
    M = logits(X, W_q, W_k)
    assert out.relative_error < ((M - logits(X, *local)).norm() / M.norm()).item()


@pytest.mark.parametrize("biases", [False, True])
def test_gqa_equals_the_expanded_mha(biases):
    X, W_q, W_k, P, affine = setup(K=2, biases=biases)
    wide = affine and affine._replace(b_k=affine.b_k.repeat_interleave(2, 0))
    a = joint_qk(W_q, W_k, P, ranks=(5, 4), affine=affine)
    b = joint_qk(W_q, W_k.repeat_interleave(2, 0), P, ranks=(5, 4), affine=wide)
    torch.testing.assert_close(compressed_logits(X, a), compressed_logits(X, b), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("K", [4, 2])
def test_full_rank_is_exact(K, biases):
    X, W_q, W_k, P, affine = setup(K=K, biases=biases)
    out = joint_qk(W_q, W_k, P, ranks=(min(d, H * h), min(d, K * h)), affine=affine)
    torch.testing.assert_close(compressed_logits(X, out), logits(X, W_q, W_k, affine))
    assert out.relative_error < 1e-9


@pytest.mark.parametrize("biases", [False, True])
def test_scale_of_the_statistics_does_not_matter(biases):
    X, W_q, W_k, _, affine = setup("outlier", biases=biases)
    C, s = X.T @ X / len(X), 2.0**10  # a power of two: the outlier makes the roundings of others show
    if biases:
        C = C - torch.outer(affine.mean, affine.mean)
    big = affine and Affine(s * affine.mean, s * affine.b_q, s * affine.b_k)
    a = joint_qk(W_q, W_k, preconditioner(C, "rootcov", ridge=1e-6), ranks=(5, 4), affine=affine)
    b = joint_qk(W_q, W_k, preconditioner(s * s * C, "rootcov", ridge=1e-6), ranks=(5, 4), affine=big)
    for x, y in ((a.B_q, b.B_q), (a.A_q, b.A_q), (a.B_k, b.B_k), (a.A_k, b.A_k)):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)
    if biases:
        torch.testing.assert_close(s * a.b_q, b.b_q, rtol=1e-5, atol=1e-3)


def test_biases_are_the_optimal_ones_of_equation_110():
    X, W_q, W_k, P, affine = setup(biases=True)
    out = joint_qk(W_q, W_k, P, ranks=(5, 4), affine=affine)
    one = torch.ones(len(X), 1, dtype=X.dtype)
    C = torch.cat([X, one], 1).T @ torch.cat([X, one], 1) / len(X)
    A = torch.block_diag(out.A_q, torch.ones(1, 1, dtype=X.dtype))
    dense = torch.cat([W_q, affine.b_q[..., None]], 2)
    expected = dense @ C @ A.T @ torch.linalg.inv(A @ C @ A.T)
    torch.testing.assert_close(torch.cat([out.B_q, out.b_q[..., None]], 2), expected, rtol=1e-6, atol=1e-8)


def test_mean_query_and_key_stay_exact():
    _, W_q, W_k, P, affine = setup(biases=True)
    out = joint_qk(W_q, W_k, P, ranks=(2, 2), affine=affine)
    torch.testing.assert_close(out.B_q @ out.A_q @ affine.mean + out.b_q, W_q @ affine.mean + affine.b_q)
    torch.testing.assert_close(out.B_k @ out.A_k @ affine.mean + out.b_k, W_k @ affine.mean + affine.b_k)


def test_augmented_system_beats_ignoring_the_mean():
    X, W_q, W_k, P, affine = setup(biases=True)
    blind = joint_qk(W_q, W_k, preconditioner(X.T @ X / len(X), "rootcov", ridge=0.0), ranks=(4, 4))
    blind = blind._replace(b_q=affine.b_q, b_k=affine.b_k)
    M = logits(X, W_q, W_k, affine)
    naive = (M - compressed_logits(X, blind)).norm() / M.norm()
    assert joint_qk(W_q, W_k, P, ranks=(4, 4), affine=affine).relative_error < 0.95 * naive


def hugging_face_rope(x, position, inv_freq):
    """``x cos + rotate_half(x) sin`` on the first 2 n dims, as in transformers' modeling_llama and modeling_phi."""
    n = len(inv_freq)
    emb = torch.cat([position * inv_freq, position * inv_freq])
    rot, rest = x[..., : 2 * n], x[..., 2 * n :]
    half = torch.cat([-rot[..., n:], rot[..., :n]], -1)
    return torch.cat([rot * emb.cos() + half * emb.sin(), rest], -1)


@pytest.mark.parametrize("n", [1, 3, 4])  # partial and full rotary
def test_rotations_are_hugging_faces(n):
    inv_freq = 10.0 ** -torch.arange(n, dtype=torch.float64)
    theta = rope_rotations(inv_freq, 8, window=4)
    q, k = heads(2, 1, 8)[:, 0]
    for m, o in ((9, 9), (9, 7), (5, 1)):  # the key at position o is before the query at m
        expected = hugging_face_rope(q, m, inv_freq) @ hugging_face_rope(k, o, inv_freq)
        torch.testing.assert_close(q @ theta[o - m + 4] @ k, expected)
    assert (len(theta), len(rope_rotations(inv_freq, 8, window=4, causal=False))) == (5, 9)


def test_rope_aware_form_wins_under_rope():
    X, W_q, W_k, P, _ = setup()
    theta = rope_rotations(torch.tensor([1.3], dtype=torch.float64), h, window=5)
    aware, blind = (joint_qk(W_q, W_k, P, ranks=(4, 4), rotations=t, alternations=30) for t in (theta, None))
    M = logits(X, W_q, W_k, theta=theta)
    errors = [((M - compressed_logits(X, out, theta)).norm() / M.norm()).item() for out in (aware, blind)]
    assert errors[0] < errors[1]


def test_window_zero_is_the_form_without_positions():
    _, W_q, W_k, P, _ = setup()
    theta = rope_rotations(torch.tensor([1.3], dtype=torch.float64), h, window=0)
    a, b = (joint_qk(W_q, W_k, P, ranks=(4, 4), rotations=t) for t in (theta, None))
    torch.testing.assert_close(a.A_q, b.A_q)


def tail_bound(W_q, W_k, P, r_q, r_k):
    G = torch.stack(
        [P.apply(q).T @ P.apply(k) for q, k in zip(W_q, W_k.repeat_interleave(H // len(W_k), 0), strict=True)]
    )
    left = torch.linalg.svdvals(G.transpose(0, 1).flatten(1))[r_q:]
    right = torch.linalg.svdvals(G.permute(2, 0, 1).flatten(1))[r_k:]
    return (left.square().sum() + right.square().sum()).item()


@pytest.mark.parametrize("K, budget", [(4, 200), (4, 214), (4, 130), (2, 119), (2, 150), (1, 90)])
def test_chosen_ranks_are_the_best_of_all_that_fit(K, budget):
    _, W_q, W_k, P, _ = setup(K=K)
    W_q = W_q * torch.linspace(3, 0.1, d, dtype=torch.float64)  # queries compress better
    pair = choose_ranks(W_q, W_k, P, budget=budget)
    fits = [
        (a, b)
        for a in range(1, d + 1)
        for b in range(1, min(d, K * h) + 1)
        if a * (d + H * h - a) + b * (d + K * h - b) <= budget
    ]
    assert pair in fits
    best = min(tail_bound(W_q, W_k, P, *f) for f in fits)
    assert tail_bound(W_q, W_k, P, *pair) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_chosen_ranks_keep_the_multiple():
    _, W_q, W_k, P, _ = setup()
    assert all(r % 4 == 0 for r in choose_ranks(W_q, W_k, P, budget=200, multiple=4))
    assert choose_ranks(W_q, W_k, P, budget=10**6, multiple=5) == (12, 12)  # full rank is always allowed


def test_fp32_statistics_are_enough_for_ordinary_layers():
    X, W_q, W_k, P, affine = setup(biases=True)
    short = preconditioner((X.T @ X / len(X) - torch.outer(X.mean(0), X.mean(0))).float(), "rootcov", ridge=0.0)
    errors = [joint_qk(W_q, W_k, p, ranks=(5, 4), affine=affine).relative_error for p in (P, short)]
    assert errors[1] == pytest.approx(errors[0], rel=1e-4)


def test_dtype_follows_the_weights():
    _, W_q, W_k, P, affine = setup(biases=True)
    out = joint_qk(W_q.bfloat16(), W_k.bfloat16(), P, ranks=(4, 4), affine=affine)
    assert {t.dtype for t in out[:6]} == {torch.bfloat16}


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(ranks=(0, 4)), r"left rank must be in \[1, 12\].*got 0"),
        (dict(ranks=(4, 7)), r"right rank must be in \[1, 6\].*got 7"),
        (dict(alternations=0), "alternations must be >= 1, got 0"),
        (dict(W_k=heads(3, h, d)), "4 query heads cannot share 3 key heads"),
        (dict(W_k=heads(2, h + 1, d)), r"W_q \(H, h, 12\).*got \(4, 3, 12\) and \(2, 4, 12\)"),
        (dict(W_q=heads(4, h, d) / 0), "non-finite"),
        (dict(rotations=torch.eye(4)[None]), r"rotations must be \(D, 3, 3\), got \(1, 4, 4\)"),
        (dict(affine=Affine(torch.zeros(d), torch.zeros(H, h), torch.zeros(H, h))), r"b_k \(2, 3\), got .*\(4, 3\)"),
    ],
)
def test_errors_say_what_to_fix(change, message):
    _, W_q, W_k, P, _ = setup(K=2)
    with pytest.raises(ValueError, match=message):
        args = {"W_q": W_q, "W_k": W_k, "precond": P, "ranks": (4, 4)} | change
        joint_qk(args.pop("W_q"), args.pop("W_k"), args.pop("precond"), **args)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("K", [4, 2])
def test_error_of_a_pair_is_that_of_the_raw_logits_on_any_tokens(K, biases, rotary):
    _, W_q, W_k, P, affine = setup(K=K, biases=biases)
    theta = rope_rotations(torch.tensor([0.7], dtype=torch.float64), h, window=2) if rotary else None
    out = joint_qk(W_q, W_k, P, ranks=(5, 3), affine=affine, rotations=theta)
    X = activations("outlier", d, tokens=50, seed=5)  # other tokens than those of the fit
    mean, C = X.mean(0), X.T @ X / len(X)
    C = C - torch.outer(mean, mean) if biases else C
    dense, other = Pair(W_q, W_k), Pair(out.B_q @ out.A_q, out.B_k @ out.A_k)
    if biases:
        dense = Pair(W_q, W_k, W_q @ mean + affine.b_q, W_k @ mean + affine.b_k)
        other = Pair(*other[:2], other.left @ mean + out.b_q, other.right @ mean + out.b_k)
    M = logits(X, W_q, W_k, affine, theta)
    expected = (M - compressed_logits(X, out, theta)).norm() / M.norm()
    assert pair_error(dense, other, metrics=(C, C), rotations=theta) == pytest.approx(expected.item(), rel=1e-8)
    assert pair_error(dense, dense, metrics=(C, C), rotations=theta) == 0


def test_errors_of_the_helpers():
    _, W_q, W_k, P, _ = setup()
    with pytest.raises(ValueError, match="budget 10 cannot hold the smallest ranks, which need 46"):
        choose_ranks(W_q, W_k, P, budget=10)
    with pytest.raises(ValueError, match=r"inv_freq must be \(n,\) with 1 <= n <= 4, got \(5,\)"):
        rope_rotations(torch.ones(5), 8)
    with pytest.raises(ValueError, match="window must be >= 0, got -1"):
        rope_rotations(torch.ones(2), 8, window=-1)


def test_tucker_bases_are_orthonormal_with_fixed_signs():
    out = pair_tucker(heads(4, 3, 12), heads(2, 3, 12), ranks=(5, 4))
    for A in (out.left, out.right):
        torch.testing.assert_close(A @ A.T, torch.eye(len(A), dtype=A.dtype))
        assert (A.gather(1, A.abs().argmax(1, keepdim=True)) > 0).all()
