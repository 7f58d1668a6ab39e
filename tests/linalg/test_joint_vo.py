"""Joint value-output compression against raw head outputs and tensorly's Tucker. CPU, no network."""

from itertools import pairwise

import pytest
import tensorly
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import activations, heads
from tensorly.decomposition import partial_tucker

from rankfold.linalg.joint_vo import attention_aware_output, joint_vo, vo_bias
from rankfold.linalg.pair_error import Pair, pair_error
from rankfold.linalg.preconditioner import preconditioner

d, d_out, h, H = 12, 10, 3, 4


def setup(kind="gaussian", K=4, *, centred=False):
    X = activations(kind, d, tokens=80)
    C = X.T @ X / len(X) - (torch.outer(X.mean(0), X.mean(0)) if centred else 0)
    return X, heads(H, d_out, h), heads(K, h, d, seed=5), preconditioner(C, "rootcov", ridge=0.0)


def head_outputs(X, W_o, W_v):
    """(H, tokens, d_out)."""
    return torch.einsum("ioh,ihd,nd->ino", W_o, W_v.repeat_interleave(len(W_o) // len(W_v), 0), X)


def dense(out):
    return out.B_o @ out.A_o, out.B_v @ out.A_v


@pytest.mark.parametrize("K", [4, 2, 1])
@pytest.mark.parametrize("kind", ["gaussian", "outlier"])
def test_reported_error_is_that_of_the_raw_head_outputs(kind, K):
    X, W_o, W_v, P = setup(kind, K)
    out = joint_vo(W_o, W_v, P, ranks=(5, 3))
    Y = head_outputs(X, W_o, W_v)
    assert out.relative_error == pytest.approx(((Y - head_outputs(X, *dense(out))).norm() / Y.norm()).item(), rel=1e-6)


def test_error_of_a_pair_is_that_of_the_raw_head_outputs_on_any_tokens():
    _, W_o, W_v, P = setup(K=2)
    O, V = dense(joint_vo(W_o, W_v, P, ranks=(5, 3)))
    X = activations("outlier", d, tokens=50, seed=5)
    Y = head_outputs(X, W_o, W_v)
    expected = ((Y - head_outputs(X, O, V)).norm() / Y.norm()).item()
    found = pair_error(Pair(W_o.mT, W_v), Pair(O.mT, V), metrics=(None, X.T @ X))
    assert found == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("ranks", [(2, 2), (5, 3), (4, 8)])
@pytest.mark.parametrize("kind", ["gaussian", "ill_conditioned"])
def test_reaches_the_error_of_tensorlys_tucker(kind, ranks):
    _, W_o, W_v, P = setup(kind)
    tensorly.set_backend("pytorch")
    G = W_o @ P.apply(W_v)  # (H, d_out, d), dense
    (core, planes), _ = partial_tucker(G, rank=list(ranks), modes=[1, 2], n_iter_max=200, tol=1e-12)
    reference = (G - torch.einsum("iab,ma,nb->imn", core, *planes)).norm() / G.norm()
    assert joint_vo(W_o, W_v, P, ranks=ranks, alternations=200).relative_error == pytest.approx(
        reference.item(), rel=1e-4
    )


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 10), st.integers(1, 6))
def test_loss_never_rises_and_more_rank_never_hurts(seed, r_o, r_v):
    W_o, W_v, P = heads(H, d_out, h, seed=seed), heads(2, h, d, seed=seed + 1), setup()[3]
    history = joint_vo(W_o, W_v, P, ranks=(r_o, r_v), alternations=6).loss_history
    assert all(b <= a + 1e-9 for a, b in pairwise(history))
    if r_o < 10:
        assert joint_vo(W_o, W_v, P, ranks=(10, r_v)).relative_error <= history[-1] + 1e-9


def test_gqa_equals_the_expanded_mha():
    X, W_o, W_v, P = setup(K=2)
    a, b = (joint_vo(W_o, V, P, ranks=(5, 4)) for V in (W_v, W_v.repeat_interleave(2, 0)))
    torch.testing.assert_close(head_outputs(X, *dense(a)), head_outputs(X, *dense(b)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("K", [4, 2])
def test_full_rank_is_exact(K):
    X, W_o, W_v, P = setup(K=K)
    out = joint_vo(W_o, W_v, P, ranks=(d_out, min(d, K * h)))
    torch.testing.assert_close(head_outputs(X, *dense(out)), head_outputs(X, W_o, W_v))
    assert out.relative_error < 1e-9


def test_scale_of_the_statistics_does_not_matter():
    X, W_o, W_v, _ = setup("outlier")
    C = X.T @ X
    a, b = (joint_vo(W_o, W_v, preconditioner(s * C, "rootcov", ridge=1e-6), ranks=(5, 4)) for s in (1.0, 1e6))
    for x, y in zip(a[:4], b[:4], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("K", [4, 2])
@pytest.mark.parametrize("with_bias", [True, False])
def test_bias_is_least_squares_on_raw_tokens_and_survives_attention(K, with_bias):
    X, W_o, W_v, P = setup(K=K, centred=True)
    b_v, b_o = (heads(1, K, h, seed=9)[0], heads(1, 1, d_out, seed=8)[0, 0]) if with_bias else (None, None)
    out = joint_vo(W_o, W_v, P, ranks=(5, 4))
    bias = vo_bias(W_o, W_v, out, mean=X.mean(0), b_v=b_v, b_o=b_o)
    values = torch.einsum("ghd,nd->gnh", W_v, X) + (b_v[:, None] if with_bias else 0)
    attention = torch.softmax(heads(1, len(X), len(X), seed=3)[0], -1)  # rows sum to 1
    wide = values.repeat_interleave(H // K, 0)
    Y = torch.einsum("ioh,inh->no", W_o, wide) + (b_o if with_bias else 0)
    attended = torch.einsum("ioh,mn,inh->mo", W_o, attention, wide) + (b_o if with_bias else 0)
    kept = head_outputs(X, *dense(out)).sum(0)
    reference = torch.linalg.lstsq(torch.ones(len(X), 1, dtype=X.dtype), Y - kept).solution[0]
    torch.testing.assert_close(bias, reference)
    error = (attended - attention @ kept - bias).norm() / (attended - attended.mean(0)).norm()
    zero = (attended - attention @ kept - (b_o if with_bias else 0)).norm() / (attended - attended.mean(0)).norm()
    assert error < 0.5 * zero


@pytest.mark.parametrize("K", [4, 2])
def test_means_that_the_values_keep_are_part_of_the_loss(K):
    X, W_o, W_v, P = setup(K=K, centred=True)
    b_v = 30 * heads(1, K, h, seed=9)[0]
    means = W_v @ X.mean(0) + b_v
    errors = []
    for kept in (means, None):
        out = joint_vo(W_o, W_v, P, ranks=(5, 4), means=kept, alternations=100)
        outputs, values = dense(out)
        bias = means - values @ X.mean(0)  # the mean values stay
        Y, Z = (
            torch.einsum("ioh,inh->ino", O, (X @ V.mT + b[:, None]).repeat_interleave(H // K, 0))
            for O, V, b in ((W_o, W_v, b_v), (outputs, values, bias))
        )
        errors.append(((Y - Z).norm() / Y.norm()).item())
        if kept is not None:
            assert out.relative_error == pytest.approx(errors[0], rel=1e-6)
    assert errors[0] < 0.9 * errors[1]


def attention_inputs(K, *, seed=3):
    """Dense o-projection inputs that mix heads: (tokens, H h) and their moment."""
    X, _, W_v, _ = setup(K=K)
    maps = torch.softmax(2 * heads(H, len(X), len(X), seed=seed), -1)
    values = torch.einsum("ghd,nd->gnh", W_v, X).repeat_interleave(H // K, 0)
    V = (maps @ values).transpose(0, 1).flatten(1)
    return V, V.T @ V / len(V)


def root(P):
    """The paper's symmetric root."""
    values, U = torch.linalg.eigh(P.gram(torch.eye(d, dtype=torch.float64)))
    return (U * values.clamp_min(0).sqrt()) @ U.T


def prediction(W_v, out, P):
    N = root(P) @ torch.linalg.pinv(W_v @ root(P))
    E = out.B_v @ out.A_v @ N
    return torch.block_diag(*E.repeat_interleave(H // len(W_v), 0))


@pytest.mark.parametrize("rank", [2, 6, 10])
@pytest.mark.parametrize("K", [4, 2])
def test_attention_aware_output_is_reduced_rank_least_squares(K, rank):
    _, W_o, W_v, P = setup(K=K)
    V, C_o = attention_inputs(K)
    out = joint_vo(W_o, W_v, P, ranks=(rank, 2))
    refit = attention_aware_output(W_o, W_v, out, P, C_o, rank=rank, ridge=0.0)
    target, inputs = V @ W_o.transpose(0, 1).flatten(1).T, V @ prediction(W_v, out, P).T
    fitted = inputs @ torch.linalg.lstsq(inputs, target, driver="gelsd").solution
    tail = torch.linalg.svdvals(fitted)[rank:].square().sum()  # reduced-rank regression
    best = ((target - fitted).square().sum() + tail).sqrt() / target.norm()
    assert refit.relative_error == pytest.approx(best.item(), rel=1e-5, abs=1e-7)
    run = inputs @ (refit.B_o @ refit.A_o.transpose(0, 1).flatten(1)).T
    assert ((target - run).norm() / target.norm()).item() == pytest.approx(best.item(), rel=1e-5, abs=1e-7)


def test_attention_aware_output_beats_the_hosvd_on_attended_values():
    _, W_o, W_v, P = setup()
    V, C_o = attention_inputs(4)
    out = joint_vo(W_o, W_v, P, ranks=(5, 5))
    target, inputs = V @ W_o.transpose(0, 1).flatten(1).T, V @ prediction(W_v, out, P).T
    plain = (target - inputs @ (out.B_o @ out.A_o).transpose(0, 1).flatten(1).T).norm() / target.norm()
    assert attention_aware_output(W_o, W_v, out, P, C_o, rank=5).relative_error < 0.9 * plain.item()


def test_why_equation_222_is_left_out():
    """With r_v >= h a random A_v has no loss on tokens predicted from values, though it ruins real tokens."""
    X, W_o, W_v, P = setup()
    A_v = heads(1, h, d, seed=11)[0]  # r_v = h, random
    N = root(P) @ torch.linalg.pinv(W_v @ root(P))
    out = joint_vo(W_o, W_v, P, ranks=(10, h))._replace(A_v=A_v, B_v=torch.linalg.pinv(A_v @ N))
    refit = attention_aware_output(W_o, W_v, out, P, attention_inputs(4)[1], rank=10, ridge=0.0)
    assert refit.relative_error < 1e-6
    Y = head_outputs(X, W_o, W_v)
    assert ((Y - head_outputs(X, refit.B_o @ refit.A_o, out.B_v @ A_v)).norm() / Y.norm()) > 0.5


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda X, O, V, P: joint_vo(O, V, P, ranks=(11, 4)), r"left rank must be in \[1, 10\].*got 11"),
        (lambda X, O, V, P: joint_vo(O, V, P, ranks=(4, 7)), r"right rank must be in \[1, 6\].*got 7"),
        (lambda X, O, V, P: joint_vo(O.mT, V, P, ranks=(4, 4)), r"W_o \(H, d_out, h\).*got \(4, 3, 10\)"),
        (lambda X, O, V, P: joint_vo(O[0], V, P, ranks=(4, 4)), r"W_o \(H, d_out, h\).*got \(10, 3\)"),
        (lambda X, O, V, P: joint_vo(O, V[0], P, ranks=(4, 4)), r"W_v \(K, h, 12\).* and \(3, 12\)"),
        (lambda X, O, V, P: joint_vo(O[:3], V, P, ranks=(4, 4)), "3 query heads cannot share 2 value heads"),
        (lambda X, O, V, P: joint_vo(O / 0, V, P, ranks=(4, 4)), "non-finite"),
        (lambda X, O, V, P: vo_bias(O, V, joint_vo(O, V, P, ranks=(4, 4)), mean=X[0, :3]), r"mean must be \(12,\)"),
        (
            lambda X, O, V, P: attention_aware_output(O, V, joint_vo(O, V, P, ranks=(4, 4)), P, torch.eye(5), rank=2),
            r"C_o must be \(12, 12\), got \(5, 5\)",
        ),
        (
            lambda X, O, V, P: attention_aware_output(O, V, joint_vo(O, V, P, ranks=(4, 4)), P, torch.eye(12), rank=0),
            r"rank must be in \[1, 10\], got 0",
        ),
    ],
)
def test_errors_say_what_to_fix(call, message):
    X, W_o, W_v, P = setup(K=2)
    with pytest.raises(ValueError, match=message):
        call(X, W_o, W_v, P)
