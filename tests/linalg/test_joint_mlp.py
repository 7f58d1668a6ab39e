"""Joint up-down compression against forward passes, grids and least squares. CPU, no network."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import activations, heads
from torch.utils._python_dispatch import TorchDispatchMode

from rankfold.linalg import joint_mlp as module
from rankfold.linalg.affine_fit import AffineFit
from rankfold.linalg.joint_mlp import MLP, _activation, _Loss, joint_mlp, mlp_error, relu_preactivation, varies

d, F, d_out = 8, 20, 7


def setup(kind="gaussian", seed=0, *, biases=True, tokens=400):
    X = activations(kind, d, tokens=tokens, seed=seed).T
    W_up, W_down = heads(1, F, d, seed=seed)[0] / X.std(), heads(1, d_out, F, seed=seed + 1)[0]
    b_up, b_down = heads(1, 1, F, seed=seed + 2)[0, 0], heads(1, 1, d_out, seed=seed + 3)[0, 0]
    return MLP(W_up, b_up if biases else None, W_down, b_down if biases else None), X


def forward(W_up, b_up, W_down, b_down, X):
    hidden = torch.relu(W_up @ X + (0 if b_up is None else b_up[:, None]))
    return W_down @ hidden + (0 if b_down is None else b_down[:, None])


def compressed(out, X):
    return forward(out.B_up @ out.A_up, out.b_up, out.B_down @ out.A_down, out.b_down, X)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10**4),
    st.sampled_from(["gaussian", "low_rank", "outlier", "ill_conditioned"]),
    st.tuples(st.integers(1, 8), st.integers(1, 7)),
    st.tuples(*[st.sampled_from([0.1, 1.0, 10.0])] * 3),
    st.sampled_from([0.0, 1e-6, 1e-2]),
)
def test_loss_never_rises(seed, kind, ranks, weights, ridge):
    mlp, X = setup(kind, seed % 40)
    out = joint_mlp(mlp, X, ranks=ranks, weights=weights, ridge=ridge)
    assert len(out.loss_history) == 5
    assert all(b <= a * (1 + 1e-7) + 1e-12 for a, b in pairwise(out.loss_history))


def test_only_the_ratio_of_alpha_and_beta_counts_in_the_first_round():
    """The rest of a truncated SVD is orthogonal to its range, so the first Eq. 228 gives ``relu(Z)`` for any gamma."""
    mlp, X = setup()

    def small(rounds: int, *weights: float):
        return compressed(joint_mlp(mlp, X, ranks=(4, 3), rounds=rounds, weights=weights), X)

    torch.testing.assert_close(small(1, 1, 1, 100), small(1, 1, 1, 1), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(small(1, 10, 1, 1), small(1, 1, 0.1, 1), rtol=1e-8, atol=1e-10)
    assert (small(1, 10, 1, 1) - small(1, 1, 1, 1)).norm() > 1e-3 * small(1, 1, 1, 1).norm()
    assert (small(2, 1, 1, 100) - small(2, 1, 1, 1)).norm() > 1e-4 * small(2, 1, 1, 1).norm()


def test_fp32_samples_are_computed_with_in_fp64():
    mlp, X = setup()
    a, b = joint_mlp(mlp, X.float().double(), ranks=(4, 4)), joint_mlp(mlp, X.float(), ranks=(4, 4))
    assert b.loss_history == a.loss_history and torch.equal(a.B_down, b.B_down)


@pytest.mark.parametrize("kind", ["gaussian", "outlier"])
@pytest.mark.parametrize("chunk", [1, 7, 399])
def test_chunks_change_nothing(kind, chunk, monkeypatch):
    mlp, X = setup(kind)
    X = X + 50 * X.std(1, keepdim=True)  # sums around zero would cancel
    whole = joint_mlp(mlp, X, ranks=(4, 3))
    monkeypatch.setattr(module, "CHUNK", chunk)
    parts = joint_mlp(mlp, X, ranks=(4, 3))
    assert parts.loss_history == pytest.approx(whole.loss_history, rel=1e-8)
    assert parts[-2:] == pytest.approx(whole[-2:], rel=1e-8)
    torch.testing.assert_close(compressed(parts, X), compressed(whole, X), rtol=1e-6, atol=1e-6)


def test_memory_does_not_grow_with_the_samples(monkeypatch):
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            tensors = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
            largest = max([largest, *(t.numel() for t in tensors if t._base is None)])
            return out

    mlp, X = setup(tokens=800)
    monkeypatch.setattr(module, "CHUNK", 16)
    with Watch():
        joint_mlp(mlp, X, ranks=(4, 3))
    assert largest <= F * F  # while X has 6,400 numbers and Z 16,000


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_streamed_rounds_are_those_of_the_formulas_on_whole_matrices(seed, biases):
    """Eq. 227-230, or 20-22 without biases, on all samples at once, with regressions by lstsq and truncated SVDs."""
    mlp, X = setup(seed=seed, biases=biases)
    X = X + X.std(1, keepdim=True)  # a mean that counts
    Z = mlp.W_up @ X + (mlp.b_up[:, None] if biases else 0)
    A, Y = Z.relu(), forward(*mlp, X)
    weights = [1 / (M - M.mean(1, keepdim=True)).square().sum() for M in (Z, A, Y)]  # of sums, not of means

    def fit(U, T, rank):
        about_u, about_t = (M.mean(1, keepdim=True) * biases for M in (U, T))
        u, t = U - about_u, T - about_t
        fitted = torch.linalg.lstsq(u.T, t.T, driver="gelsd").solution.T
        P = torch.linalg.svd(fitted @ u, full_matrices=False).U[:, :rank]
        return (lambda V: P @ (P.T @ (fitted @ (V - about_u))) + about_t), P @ P.T @ fitted

    def value():
        terms = (up(X) - Z, A - Z.relu(), down(A) - Y)
        return sum(w * term.square().sum() for w, term in zip(weights, terms, strict=True)).item()

    (up, _), (down, W) = fit(X, Z, 4), fit(A, Y, 3)
    history = [value()]
    for _ in range(3):
        shift = down(torch.zeros(F, 1, dtype=X.dtype))
        left = weights[2] * W.T @ W + weights[1] * torch.eye(F, dtype=X.dtype)
        A = torch.linalg.solve(left, weights[1] * Z.relu() + weights[2] * W.T @ (Y - shift))
        Z = relu_preactivation(up(X), A, alpha=weights[0], beta=weights[1])
        (up, _), (down, W) = fit(X, Z, 4), fit(A, Y, 3)
        history.append(value())
    out = joint_mlp(mlp, X, ranks=(4, 3), rounds=3, ridge=0.0, refit=False)
    assert out.loss_history == pytest.approx(history, rel=1e-6)
    torch.testing.assert_close(out.B_up @ out.A_up @ X + out.b_up[:, None], up(X), rtol=1e-5, atol=1e-5)


def test_the_error_of_an_mlp_is_that_of_its_outputs(monkeypatch):
    mlp, X = setup()
    other = mlp._replace(W_up=mlp.W_up * 1.1, b_down=None)
    Y = forward(*mlp, X)
    monkeypatch.setattr(module, "CHUNK", 60)
    assert mlp_error(mlp, other, X) == pytest.approx(((forward(*other, X) - Y).norm() / Y.norm()).item(), rel=1e-12)
    single = (MLP(*(None if M is None else M.float() for M in one)) for one in (mlp, other))
    assert mlp_error(*single, X.float()) == pytest.approx(mlp_error(mlp, other, X), rel=1e-5)


def test_rounds_lower_the_loss_and_the_true_error():
    mlp, X = setup()
    out = joint_mlp(mlp, X, ranks=(4, 4))
    assert out.loss_history[-1] < 0.9 * out.loss_history[0]
    assert out.relative_error < out.local_relative_error


@pytest.mark.parametrize("refit", [True, False])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("kind", ["gaussian", "outlier"])
def test_reported_error_is_that_of_the_forward_pass(kind, biases, refit):
    mlp, X = setup(kind, biases=biases)
    out = joint_mlp(mlp, X, ranks=(4, 5), refit=refit)
    Y = forward(*mlp, X)
    assert out.relative_error == pytest.approx(((compressed(out, X) - Y).norm() / Y.norm()).item(), rel=1e-9)


def with_constant(M):
    return torch.cat([M, torch.ones(1, M.shape[1], dtype=M.dtype)])


@pytest.mark.parametrize("ranks", [(3, 4), (8, 7)])
def test_starting_point_is_the_best_local_compression(ranks):
    mlp, X = setup()
    out = joint_mlp(mlp, X, ranks=ranks, rounds=0, ridge=0.0, refit=False)
    Z = mlp.W_up @ X + mlp.b_up[:, None]
    Y = forward(*mlp, X)
    for target, fit, rank in (
        (Z, out.B_up @ out.A_up @ X + out.b_up[:, None], ranks[0]),
        (Y, out.B_down @ out.A_down @ Z.relu() + out.b_down[:, None], ranks[1]),
    ):
        centred = target - target.mean(1, keepdim=True)
        best = torch.linalg.svdvals(centred)[rank:].norm()  # Eckart-Young on raw outputs, constant free
        assert (target - fit).norm().item() == pytest.approx(best.item(), rel=1e-6, abs=1e-6)
    assert out.relative_error == out.local_relative_error


def test_loss_of_the_start_is_the_stated_one():
    mlp, X = setup()
    out = joint_mlp(mlp, X, ranks=(3, 4), weights=(2.0, 3.0, 5.0), rounds=0, ridge=0.0, refit=False)
    Z, Y = mlp.W_up @ X + mlp.b_up[:, None], forward(*mlp, X)
    up = (out.B_up @ out.A_up @ X + out.b_up[:, None] - Z).square().sum() / (Z - Z.mean(1, keepdim=True)).square().sum()
    down = out.B_down @ out.A_down @ Z.relu() + out.b_down[:, None] - Y
    down = down.square().sum() / (Y - Y.mean(1, keepdim=True)).square().sum()
    assert out.loss_history == pytest.approx([(2 * up + 5 * down).item()])  # Z and relu(Z) agree: no middle term


def test_refit_is_reduced_rank_least_squares_on_the_real_hidden_activations():
    mlp, X = setup()
    out = joint_mlp(mlp, X, ranks=(4, 3), ridge=0.0)
    hidden = torch.relu(out.B_up @ out.A_up @ X + out.b_up[:, None])
    Y, inputs = forward(*mlp, X), with_constant(hidden)
    fitted = (torch.linalg.lstsq(inputs.T, Y.T, driver="gelsd").solution.T) @ inputs
    tail = torch.linalg.svdvals(fitted - fitted.mean(1, keepdim=True))[3:].square().sum()
    best = ((Y - fitted).square().sum() + tail).sqrt()
    assert (compressed(out, X) - Y).norm().item() == pytest.approx(best.item(), rel=1e-6)
    assert out.relative_error < joint_mlp(mlp, X, ranks=(4, 3), ridge=0.0, refit=False).relative_error


@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(0.1, 10), st.floats(0.1, 10))
def test_preactivation_is_the_global_minimum(u, a, alpha, beta):
    z = relu_preactivation(torch.tensor(u), torch.tensor(a), alpha=alpha, beta=beta)
    grid = torch.linspace(-4, 4, 2001)

    def cost(z):
        return alpha * (u - z) ** 2 + beta * (a - z.clamp_min(0)) ** 2

    assert cost(z) <= cost(grid).min() + 1e-5


@pytest.mark.parametrize("gamma", [0.1, 1.0, 30.0])
def test_activation_is_the_ridge_regression_of_equation_228(gamma):
    mlp, X = setup()
    loss, Z, Y = _Loss(1.0, 0.7, gamma, 0.0, 0.0), mlp.W_up @ X, forward(*mlp, X)
    B, A = mlp.W_down[:, :3], heads(1, 3, F, seed=9)[0]
    W, b = B @ A, mlp.b_down
    primal = torch.linalg.solve(
        gamma * W.T @ W + 0.7 * torch.eye(F, dtype=W.dtype), 0.7 * Z.relu() + gamma * W.T @ (Y - b[:, None])
    )
    torch.testing.assert_close(_activation(loss, Z, Y, AffineFit(B, A, b)), primal, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["gaussian", "outlier"])
def test_full_rank_is_exact(kind):
    mlp, X = setup(kind)
    out = joint_mlp(mlp, X, ranks=(d, d_out))
    torch.testing.assert_close(compressed(out, X), forward(*mlp, X), rtol=1e-6, atol=1e-5)
    assert out.relative_error < 1e-7


def test_scale_of_inputs_and_outputs_does_not_matter():
    mlp, X = setup()
    a = joint_mlp(mlp, X, ranks=(4, 4))
    b = joint_mlp(
        mlp._replace(W_up=mlp.W_up / 1e3, W_down=9 * mlp.W_down, b_down=9 * mlp.b_down), 1e3 * X, ranks=(4, 4)
    )
    assert a.loss_history == pytest.approx(b.loss_history, rel=1e-6)
    torch.testing.assert_close(9 * compressed(a, X), compressed(b, 1e3 * X), rtol=1e-5, atol=1e-5)


def test_dtype_follows_the_weights():
    mlp, X = setup()
    out = joint_mlp(MLP(*(w.bfloat16() for w in mlp)), X, ranks=(4, 4), rounds=1)
    assert {t.dtype for t in out[:6]} == {torch.bfloat16}


def test_an_mlp_that_is_always_off_does_not_vary():
    mlp, X = setup()
    assert varies(mlp, X) and varies(mlp._replace(b_up=None, b_down=None), X)
    assert not varies(mlp._replace(b_up=mlp.b_up - 1e6), X)
    assert not varies(mlp._replace(W_down=0 * mlp.W_down), X)
    assert not varies(mlp, X[:, :1].expand(-1, 9))
    with pytest.raises(ValueError, match="A does not vary over the samples"):
        joint_mlp(mlp._replace(b_up=mlp.b_up - 1e6), X, ranks=(4, 4))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(ranks=(0, 4)), r"up rank must be in \[1, 8\], got 0"),
        (dict(ranks=(4, 8)), r"down rank must be in \[1, 7\], got 8"),
        (dict(rounds=-1), "rounds and ridge must be >= 0 and weights > 0, got -1"),
        (dict(weights=(1.0, 0.0, 1.0)), r"weights > 0, got 4, .*\(1.0, 0.0, 1.0\)"),
        (dict(X=torch.zeros(5, 9)), r"X \(d, l\) expected, got \(20, 8\), \(7, 20\), \(5, 9\)"),
        (dict(X=torch.full((d, 9), float("nan"))), "X has non-finite"),
        (dict(X=torch.ones(d, 9)), "X does not vary over the samples.*more calibration tokens"),
        (dict(X=0.1 + 1e-17 * torch.arange(9.0).repeat(d, 1).double()), "X does not vary"),  # only rounding varies
    ],
)
def test_errors_say_what_to_fix(change, message):
    mlp, X = setup()
    args = {"X": X, "ranks": (4, 4)} | change
    with pytest.raises(ValueError, match=message):
        joint_mlp(mlp, args.pop("X"), **args)
