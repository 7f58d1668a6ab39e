"""Type I against least squares on the raw activations, the dense score formula, and the paper's bounds."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modegpt_problems import MLP, mlp
from problems import KINDS

from rankfold.linalg.nystrom import SELECTIONS, _refit, nystrom

F64 = torch.float64


def dense_scores(C, ridge):
    lam = ridge * C.diagonal().mean()
    return (C @ torch.linalg.inv(C + lam * torch.eye(len(C), dtype=C.dtype))).diagonal()


def raw_error(p: MLP, out) -> float:
    """Mean squared output error per token, from the activations themselves."""
    return (p.a @ p.W.T - p.a[:, out.keep] @ out.W_down.T).square().sum().item() / len(p.a)


def quiet_tail(seed: int, F: int, R: int, loudness: float) -> MLP:
    """All but ``R`` units fire ``loudness`` times as loud as the others: there the leverage of the rest is small."""
    p = mlp("gaussian", F=F, seed=seed)
    a = p.a.clone()
    a[:, torch.randperm(F, generator=torch.Generator().manual_seed(seed))[R:]] *= loudness
    return MLP(a, p.W)


@pytest.mark.parametrize("ridge", [1e-6, 1e-4, 1e-1])
@pytest.mark.parametrize("kind", KINDS)
def test_epsilon_is_the_sum_of_the_dropped_scores_by_the_dense_formula(kind, ridge):
    p = mlp(kind)
    for rank in range(1, 12):  # the highest scores stay, so two ranks in a row tell the score of one unit
        out = nystrom(p.W, p.C, rank=rank, ridge=ridge, selection="leverage")
        dropped = dense_scores(p.C, ridge).sum() - dense_scores(p.C, ridge)[out.keep].sum()
        assert out.bounds.epsilon == pytest.approx(dropped.item(), rel=1e-6, abs=1e-5)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("rank", [1, 5, 11])
@pytest.mark.parametrize("kind", ["gaussian", "outlier", "wide", "tall"])
def test_refit_is_least_squares_on_the_raw_activations(kind, rank, selection):
    p = mlp(kind)
    out = nystrom(p.W, p.C, rank=rank, ridge=1e-10, selection=selection)
    reference = torch.linalg.lstsq(p.a[:, out.keep], p.a @ p.W.T).solution.T
    torch.testing.assert_close(out.W_down, reference, rtol=1e-4, atol=1e-4 * reference.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
def test_refit_reaches_the_least_squares_error(kind):
    p = mlp(kind)
    out = nystrom(p.W, p.C, rank=6, ridge=1e-9)
    Y = p.a @ p.W.T
    best = torch.linalg.lstsq(p.a[:, out.keep], Y, driver="gelsd").solution
    optimum = (Y - p.a[:, out.keep] @ best).square().sum().item() / len(Y)
    assert raw_error(p, out) <= optimum * (1 + 1e-5) + 1e-7 * Y.square().sum().item() / len(Y)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("rank", [1, 4, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_the_error_measured_on_the_raw_activations(kind, rank, selection):
    p = mlp(kind)
    out = nystrom(p.W, p.C, rank=rank, selection=selection)
    power = (p.a @ p.W.T).square().sum().item() / len(p.a)
    assert out.error == pytest.approx(raw_error(p, out), rel=1e-6, abs=1e-12 * power)
    assert out.relative_error == pytest.approx((raw_error(p, out) / power) ** 0.5, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_highest_scores_are_kept_in_order(kind):
    p = mlp(kind)
    out, scores = nystrom(p.W, p.C, rank=5, selection="leverage"), dense_scores(p.C, 1e-4)
    dropped = torch.ones(12, dtype=torch.bool)
    dropped[out.keep] = False
    assert scores[out.keep].min() >= scores[dropped].max()
    assert out.keep.tolist() == sorted(set(out.keep.tolist())) and out.W_down.shape == (5, 5)


def test_independent_units_are_chosen_and_their_weights_stay():
    """Without correlation there is nothing to refit, and the loudest units stay, as brute force says."""
    C = torch.diag(torch.tensor([1.0, 9.0, 4.0, 0.5, 16.0, 2.0], dtype=F64))
    W = torch.ones(3, 6, dtype=F64)
    out = nystrom(W, C, rank=3, ridge=1e-9)
    best = max(itertools.combinations(range(6), 3), key=lambda k: sum(C[i, i].item() for i in k))
    assert out.keep.tolist() == list(best) == [1, 2, 4]
    torch.testing.assert_close(out.W_down, W[:, out.keep], rtol=1e-6, atol=0)
    assert out.error == pytest.approx(3 * (1 + 0.5 + 2), rel=1e-6)


def test_a_copied_unit_is_not_kept_twice():
    p = mlp("gaussian", F=6)
    a = torch.cat([p.a, 0.5 * p.a[:, :1]], dim=1)  # unit 6 repeats unit 0
    out = nystrom(torch.cat([p.W, p.W[:, :1]], dim=1), a.T @ a, rank=6, ridge=1e-8)
    assert len({0, 6} & set(out.keep.tolist())) == 1
    assert out.relative_error < 1e-3


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["gaussian", "outlier", "low_rank"]), st.integers(1, 11), st.floats(-12, 12))
def test_scale_of_the_statistics_does_not_matter(kind, rank, exponent):
    p, scale = mlp(kind), 10.0**exponent
    a, b = nystrom(p.W, p.C, rank=rank), nystrom(p.W, scale * p.C, rank=rank)
    assert torch.equal(a.keep, b.keep)
    torch.testing.assert_close(a.W_down, b.W_down, rtol=1e-5, atol=1e-7)
    assert b.error == pytest.approx(scale * a.error, rel=1e-5)
    assert b.relative_error == pytest.approx(a.relative_error, rel=1e-5)
    assert b.bounds.theorem == pytest.approx(scale * a.bounds.theorem, rel=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 11))
def test_relabelling_the_units_relabels_the_result(seed, rank):
    p = mlp("gaussian", seed=seed % 40)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    a, b = nystrom(p.W, p.C, rank=rank), nystrom(p.W[:, order], p.C[order][:, order], rank=rank)
    back, position = order[b.keep].sort()
    assert torch.equal(a.keep, back)
    torch.testing.assert_close(a.W_down, b.W_down[:, position], rtol=1e-6, atol=1e-8)
    assert b.error == pytest.approx(a.error, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(0, 60),
    st.integers(1, 11),
    st.sampled_from([1e-6, 1e-4, 1e-2]),
    st.sampled_from(SELECTIONS),
)
def test_theorem_1_bounds_the_measured_error(kind, seed, rank, ridge, selection):
    p = mlp(kind, seed=seed)
    out = nystrom(p.W, p.C, rank=rank, ridge=ridge, selection=selection)
    assert raw_error(p, out) <= out.bounds.theorem * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60), st.integers(2, 11), st.floats(1e-4, 3e-2), st.sampled_from([1e-3, 1e-2, 1e-1]))
def test_proposition_1_bounds_the_measured_error_wherever_it_is_given(seed, rank, loudness, ridge):
    p = quiet_tail(seed, 12, rank, loudness)
    out = nystrom(p.W, p.C, rank=rank, ridge=ridge)
    if out.bounds.proposition is not None:
        assert out.bounds.epsilon < 1
        assert raw_error(p, out) <= out.bounds.proposition * (1 + 1e-9)


def test_proposition_1_says_something_where_the_dropped_units_are_quiet():
    p = quiet_tail(0, 12, 8, 1e-2)
    out = nystrom(p.W, p.C, rank=8, ridge=1e-2)
    dropped = [i for i in range(12) if i not in out.keep.tolist()]
    assert out.bounds.epsilon == pytest.approx(dense_scores(p.C, 1e-2)[dropped].sum().item(), rel=1e-6)
    assert out.bounds.epsilon < 1 and out.bounds.proposition is not None
    assert raw_error(p, out) <= min(out.bounds.theorem, out.bounds.proposition)


def test_proposition_1_is_silent_where_its_premise_fails():
    p = mlp("gaussian")
    out = nystrom(p.W, p.C, rank=6)
    assert out.bounds.epsilon >= 1 and out.bounds.proposition is None


def test_the_papers_proposition_1_fails_for_a_ridge_that_is_not_tied_to_the_tail():
    """Dense computation, none of our code. The proof takes Eq. 15 from McCurdy (2018), who ties the ridge to the tail,
    ``lam = sum_(i>k) sigma_i / k``. Algorithm 1 fixes ``lam`` instead; epsilon goes to 0 as ``lam`` grows, while the
    least squares error stays. With ``lam`` in the place of that sum the chain of inequalities holds."""
    p, k, d = mlp("gaussian"), list(range(11)), [11]
    order = dense_scores(p.C, 1e-4).argsort(descending=True)
    C, W = p.C[order][:, order], p.W[:, order]
    schur = C[d][:, d] - C[d][:, k] @ torch.linalg.inv(C[k][:, k]) @ C[k][:, d]
    error = (W[:, d] @ schur @ W[:, d].T).trace()
    sigma = torch.linalg.eigvalsh(C).flip(0)
    front = torch.linalg.matrix_norm(W, 2) ** 2 / sigma[-1]
    for lam, holds in [(sigma[11] / 11, True), (1e3 * sigma[0], False)]:
        epsilon = (C @ torch.linalg.inv(C + lam * torch.eye(12, dtype=F64))).diagonal()[d].sum()
        assert epsilon < 1
        stated = front * (epsilon * 12 / (11 * (1 - epsilon))) ** 2 * sigma[11] ** 2
        corrected = front * 12 * (epsilon * lam / (1 - epsilon)) ** 2
        assert (error <= stated) == holds
        assert error <= corrected


def test_theorem_1_is_the_dense_formula():
    """Its two spectral norms are estimated from above, each within 1 %."""
    p = mlp("gaussian")
    out = nystrom(p.W, p.C, rank=7, ridge=1e-4)
    C = p.C + 1e-4 * p.C.diagonal().mean() * torch.eye(12, dtype=F64)
    k = out.keep
    residual = C - C[:, k] @ torch.linalg.inv(C[k][:, k]) @ C[k]
    reference = torch.linalg.matrix_norm(p.W, 2) ** 2 * torch.linalg.matrix_norm(torch.linalg.inv(C), 2)
    reference = (reference * residual.square().sum()).item()
    assert reference * (1 - 1e-9) <= out.bounds.theorem <= 1.02 * reference


def test_bound_holds_for_an_output_direction_that_power_iteration_from_ones_cannot_see():
    """Two outputs that are each other's opposite: ``W W^T`` annihilates the vector of ones."""
    w = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)
    C = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=F64))
    out = nystrom(torch.stack([w, -w]), C, rank=2)
    assert out.error > 1
    assert out.error <= out.bounds.theorem


def test_bound_holds_where_the_spectrum_is_nearly_flat():
    """One output that reads the quietest unit: Theorem 1 is tight, so its spectral norms must not be underestimated."""
    energy = torch.ones(64, dtype=F64)
    energy[-1] = 0.99
    W = torch.zeros(1, 64, dtype=F64)
    W[0, -1] = 1
    out = nystrom(W, torch.diag(energy), rank=63, ridge=1e-6, selection="leverage")
    assert out.keep.tolist() == list(range(63))
    assert out.error <= out.bounds.theorem * (1 + 1e-9)


def test_bound_holds_where_what_is_dropped_never_fires():
    """The dropped unit is silent, the kept ones are near the damping: shrinking THEIR weights is then all the error."""
    C = torch.diag(torch.cat([torch.full((39,), 1e-3), torch.ones(1) * 40, torch.zeros(1)]).double())
    out = nystrom(torch.eye(41, dtype=F64), C, rank=40, ridge=1e-3)
    assert out.keep.tolist() == list(range(40))
    assert out.error <= out.bounds.theorem * (1 + 1e-9)


def test_damping_does_not_shrink_the_weights_of_units_that_stay():
    """Damp what stands in for the dropped units, not what is known of the kept ones. Here units are independent and the
    dropped one is silent, so keeping the weights as they are is free of error at any ridge."""
    C = torch.diag(torch.tensor([4.0, 1.0, 0.2, 0.0], dtype=F64))
    W = torch.arange(8, dtype=F64).view(2, 4)
    out = nystrom(W, C, rank=3, ridge=0.1)
    torch.testing.assert_close(out.W_down, W[:, :3])
    assert out.error == pytest.approx(0.0, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 50), st.integers(2, 12))
def test_keeping_more_units_of_the_same_order_never_costs(seed, rank):
    p = mlp("gaussian", seed=seed)
    less, more = (nystrom(p.W, p.C, rank=r, ridge=1e-9) for r in (rank - 1, rank))
    assert set(less.keep.tolist()) <= set(more.keep.tolist())
    assert more.error <= less.error * (1 + 1e-6) + 1e-9


def test_full_rank_gives_the_weight_back_bit_for_bit():
    p = mlp("gaussian")
    W = p.W.bfloat16()
    out = nystrom(W, p.C, rank=12)
    assert torch.equal(out.W_down, W) and out.W_down.data_ptr() != W.data_ptr()
    assert out.keep.tolist() == list(range(12)) and out.error == out.relative_error == 0.0
    assert out.bounds.theorem == 0.0 and not out.clamped


def test_covariance_and_mean_are_the_best_refit_with_a_bias():
    p, rank = mlp("gaussian"), 5
    mean = p.a.mean(0)
    out = nystrom(p.W, p.C - torch.outer(mean, mean), rank=rank, ridge=1e-11)
    shift = p.W @ mean - out.W_down @ mean[out.keep]
    design = torch.cat([p.a[:, out.keep], torch.ones(len(p.a), 1, dtype=F64)], dim=1)
    reference = torch.linalg.lstsq(design, p.a @ p.W.T).solution.T
    torch.testing.assert_close(torch.cat([out.W_down, shift[:, None]], 1), reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_units_that_never_fire_cost_nothing(selection):
    p = mlp("gaussian")
    out = nystrom(p.W, 0 * p.C, rank=5, selection=selection)
    assert out.keep.tolist() == list(range(5)) and torch.equal(out.W_down, p.W[:, :5])
    assert out.error == out.relative_error == 0.0


def test_output_keeps_the_weight_dtype_and_statistics_stay_untouched():
    p = mlp("gaussian")
    C = p.C.clone()
    out = nystrom(p.W.bfloat16(), C, rank=4)
    assert out.W_down.dtype == torch.bfloat16
    assert torch.equal(C, p.C)
    again = nystrom(p.W.bfloat16(), C, rank=4)
    assert torch.equal(out.W_down, again.W_down) and torch.equal(out.keep, again.keep) and out.bounds == again.bounds


def indefinite(beyond: float, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A moment of rank 5 whose lost digits made one null direction negative by ``beyond`` times the damping."""
    C = mlp("low_rank").C
    null = torch.linalg.eigh(C).eigenvectors[:, 0]
    broken = C - beyond * ridge * C.diagonal().mean() * torch.outer(null, null)
    return C, (broken + broken.T) / 2


def test_a_moment_that_is_indefinite_beyond_the_ridge_is_clamped():
    ridge = 1e-4
    clean, broken = indefinite(3.0, ridge)
    W = mlp("low_rank").W
    a, b = nystrom(W, clean, rank=6, ridge=ridge), nystrom(W, broken, rank=6, ridge=ridge)
    assert b.clamped and not a.clamped
    assert torch.equal(a.keep, b.keep)
    torch.testing.assert_close(a.W_down, b.W_down, rtol=1e-3, atol=1e-3)
    assert b.bounds.epsilon == pytest.approx(a.bounds.epsilon, rel=1e-3, abs=1e-3)
    assert b.error <= b.bounds.theorem


@pytest.mark.parametrize("beyond", [0.5, 0.99])
def test_scores_stay_in_range_where_the_moment_is_indefinite_within_the_ridge(beyond):
    clean, broken = indefinite(beyond, 1e-4)
    W = mlp("low_rank").W
    for rank in range(1, 12):
        a, b = (nystrom(W, C, rank=rank, ridge=1e-4, selection="leverage").bounds.epsilon for C in (clean, broken))
        assert 0 <= b < 12 - rank and b == pytest.approx(a, rel=1e-2, abs=1e-2 * (12 - rank))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: nystrom(p.W, p.C, rank=0), r"rank must be in \[1, 12\], got 0"),
        (lambda p: nystrom(p.W, p.C, rank=13), r"rank must be in \[1, 12\], got 13"),
        (lambda p: nystrom(p.W[:, :7], p.C, rank=3), r"C must be \(7, 7\), got \(12, 12\)"),
        (lambda p: nystrom(p.W, p.C / 0, rank=3), "C has non-finite entries; were the activations accumulated in fp16"),
        (lambda p: nystrom(p.W, p.C, rank=3, ridge=0.0), "ridge must be > 0, got 0.0"),
        (lambda p: nystrom(p.W, p.C, rank=3, ridge=-1.0), "ridge must be > 0, got -1.0"),
        (lambda p: nystrom(p.W, -p.C, rank=3), r"must be positive, got -.*; the units never fire, or ridge is 0"),
        (lambda p: nystrom(p.W, p.C, rank=3, selection="norm"), "selection must be one of obs, leverage, got 'norm'"),
    ],
)
def test_errors_say_what_to_fix(call, message):
    with pytest.raises(ValueError, match=message):
        call(mlp("gaussian"))


def test_a_ridge_below_rounding_is_refused_with_a_remedy():
    """Even clamped, a damping of 1e-30 times the largest eigenvalue leaves nothing positive to factorise."""
    C = mlp("low_rank").C
    with pytest.raises(
        torch.linalg.LinAlgError, match=r"^C \+ lam I \(12, 12\) is not positive definite; raise the ridge"
    ):
        nystrom(mlp("low_rank").W, C, rank=8, ridge=1e-30)


def test_kept_units_that_cannot_be_solved_for_are_refused():
    keep, dropped = torch.tensor([0, 2]), torch.tensor([False, True, False, True])
    message = r"^the block of the kept units \(2, 2\) is not positive definite; raise the ridge"
    with pytest.raises(torch.linalg.LinAlgError, match=message):
        _refit(torch.ones(3, 4), -torch.eye(4), keep, dropped, 0.5)


@pytest.mark.parametrize("rank", [2, 6, 10])
@pytest.mark.parametrize("kind", KINDS)
def test_in_an_output_metric_units_leave_by_what_they_cost_there(kind, rank):
    """Naive greedy search: every unit tried, the rest refitted by least squares, and the errors weighed by ``G``."""
    p = mlp(kind)
    g = torch.randn(400, 5, generator=torch.Generator().manual_seed(1), dtype=F64) * torch.tensor([9.0, 3, 1, 0.3, 0.1])
    G = g.T @ g / len(g)
    damped = p.C + 1e-4 * p.C.diagonal().mean() * torch.eye(len(p.C), dtype=F64)

    def cost(keep, metric):
        k, d = keep, [i for i in range(len(damped)) if i not in keep]
        left = damped[d][:, d] - damped[d][:, k] @ torch.linalg.solve(damped[k][:, k], damped[k][:, d])
        return (metric @ p.W[:, d] @ left @ p.W[:, d].T).trace().item()

    def greedy(metric):
        keep = list(range(12))
        while len(keep) > rank:
            keep = min(([i for i in keep if i != j] for j in keep), key=lambda rest: cost(rest, metric))
        return keep

    out = nystrom(p.W, p.C, rank=rank, output_root=torch.linalg.cholesky(G).T)
    wanted = greedy(G)
    assert out.keep.tolist() == wanted or cost(out.keep.tolist(), G) == pytest.approx(cost(wanted, G), rel=1e-6)
    plain = nystrom(p.W, p.C, rank=rank)
    if kind == "gaussian":
        assert plain.keep.tolist() == greedy(torch.eye(5, dtype=F64)) != wanted  # the metric matters


@pytest.mark.parametrize("rank", [3, 8])
def test_the_best_weights_on_kept_units_do_not_depend_on_the_output_metric(rank):
    p = mlp("gaussian")
    out = nystrom(
        p.W, p.C, rank=rank, ridge=1e-10, output_root=torch.diag(torch.tensor([5.0, 1, 0.1, 2, 3], dtype=F64))
    )
    reference = torch.linalg.lstsq(p.a[:, out.keep], p.a @ p.W.T).solution.T
    torch.testing.assert_close(out.W_down, reference, rtol=1e-6, atol=1e-8)
