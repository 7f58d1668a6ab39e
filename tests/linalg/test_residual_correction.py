"""Corrections towards what is missing, against plain regressions on the samples themselves."""

import pytest
import torch

from allocations import peak_bytes
from rankfold.linalg import residual_correction
from rankfold.linalg.output_refit import refit_across_heads
from rankfold.linalg.psd import WIDE
from rankfold.linalg.residual_correction import KEEP, RIDGES, Regression, correct

F64 = torch.float64


def samples(tokens: int, *, width: int = 12, out: int = 5, noise: float = 0.3, seed: int = 0):
    """Inputs, targets, and a weight that is not the one the targets come from."""
    g = torch.Generator().manual_seed(seed)
    true, W = (torch.randn(out, width, generator=torch.Generator().manual_seed(s), dtype=F64) for s in (100, 101))
    h = torch.randn(tokens, width, generator=g, dtype=F64) @ torch.diag(torch.logspace(0, -2, width, dtype=F64))
    return h, h @ true.T + noise * torch.randn(tokens, out, generator=g, dtype=F64), W


def regression(h, t) -> Regression:
    return Regression(h.T @ h / len(h), t.T @ h / len(h), t.square().sum(1).mean())


def test_the_loss_is_that_of_the_samples():
    h, t, W = samples(50)
    assert regression(h, t).loss(W).item() == pytest.approx((t - h @ W.T).square().sum(1).mean().item())


@pytest.mark.parametrize("noise", [0.01, 0.3, 3.0])
def test_nothing_on_a_fine_grid_gains_so_much_by_a_smaller_change(noise):
    """Strengths in [0, 1] and the ridges, by ridge regressions solved on the rows."""
    h, t, W = samples(40, noise=noise)
    others = samples(200, noise=noise, seed=1)[:2]
    found = correct(W, regression(h, t), regression(*others))
    tried = []  # gain on the held-out samples, size of the change
    before = regression(*others).loss(W).item()
    for ridge in RIDGES:
        lam = ridge * h.square().mean(0).mean() * len(h)
        rows = torch.cat([h, lam.sqrt() * torch.eye(h.shape[1], dtype=F64)])
        wanted = torch.cat([t - h @ W.T, torch.zeros(h.shape[1], t.shape[1], dtype=F64)])
        step = torch.linalg.lstsq(rows, wanted).solution.T
        for strength in torch.linspace(0, 1, 1001).tolist():
            gain = before - regression(*others).loss(W + strength * step).item()
            tried.append((gain, strength * step.norm().item()))
    scale, best = others[1].square().sum(1).mean().item(), max(gain for gain, _ in tried)
    assert (found.before - found.after) * scale == pytest.approx(KEEP * best, rel=1e-3)
    smallest = min(size for gain, size in tried if gain >= KEEP * best)
    assert (found.W - W).norm().item() == pytest.approx(smallest, rel=5e-3)
    assert found.after == pytest.approx(regression(*others).loss(found.W).item() / scale, rel=1e-9)
    assert found.before == pytest.approx(regression(*others).loss(W).item() / scale, rel=1e-9)
    lam = found.ridge * h.square().mean(0).mean() * len(h)
    step = torch.linalg.solve(h.T @ h + lam * torch.eye(h.shape[1], dtype=F64), h.T @ (t - h @ W.T)).T
    torch.testing.assert_close(found.W, W + found.strength * step)


@pytest.mark.parametrize("exponent", [-40, -7, 9])
def test_units_of_the_targets_do_not_matter(exponent):
    """Powers of two, so that every number is the same up to its exponent."""
    unit = 2.0**exponent
    (h, t, W), others = samples(40), samples(200, seed=1)[:2]
    plain = correct(W, regression(h, t), regression(*others))
    scaled = correct(unit * W, regression(h, unit * t), regression(others[0], unit * others[1]))
    assert plain.strength > 0 and scaled[1:] == plain[1:]
    assert torch.equal(scaled.W, unit * plain.W)


def test_where_held_out_samples_contradict_the_weight_stays():
    h, t, W = samples(40)
    opposite = 2 * h @ W.T - t
    found = correct(W, regression(h, t), regression(h, opposite))
    assert found.strength == 0.0 and torch.equal(found.W, W) and found.after == found.before
    assert found.ridge == RIDGES[-1]


def test_what_is_fitted_and_what_confirms_are_not_the_same_windows():
    """The step is the regression on the first, its strength the best on the others."""
    (h, t, W), (g, u, _) = samples(40, noise=3.0), samples(200, noise=3.0, seed=1)
    fit, others = regression(h, t), regression(g, u)
    there, back = correct(W, fit, others), correct(W, others, fit)
    alone = correct(W, fit, fit)  # windows that confirm what they were fitted to gain more
    assert there.strength < 0.9 * alone.strength
    assert back.W.sub(there.W).norm() > 0.1 * there.W.sub(W).norm()


def test_a_moment_too_indefinite_for_every_ridge_leaves_the_weight():
    h, t, W = samples(40)
    good = regression(h, t)
    bad = good._replace(C=good.C - 3 * good.C.diagonal().sum() * torch.eye(len(good.C), dtype=F64))
    found = correct(W, bad, good)
    assert torch.equal(found.W, W) and (found.strength, found.ridge) == (0.0, RIDGES[-1])
    assert found.before == found.after == pytest.approx((good.loss(W) / good.energy).item())


def wide_problem(out: int, fit: int = 700, others: int = 300):
    """A moment wide enough to compare ridges on a sketch, fitted to fewer samples than it has directions."""
    g = torch.Generator().manual_seed(0)
    true, W = (torch.randn(out, WIDE, generator=g, dtype=F64) * WIDE**-0.5 for _ in range(2))
    loud = torch.diag(torch.logspace(1, -2, WIDE, dtype=F64))
    problems = []
    for tokens in (fit, others):
        h = torch.randn(tokens, WIDE, generator=g, dtype=F64) @ loud
        problems.append(regression(h, h @ (W + 0.1 * true).T + 0.5 * torch.randn(tokens, out, generator=g, dtype=F64)))
    return W, *problems


def test_a_sketch_of_the_outputs_chooses_the_ridge_that_all_of_them_choose(monkeypatch):
    W, fit, others = wide_problem(192)
    found = correct(W, fit, others)
    monkeypatch.setattr(residual_correction, "SKETCH", 192)  # all outputs
    exact = correct(W, fit, others)
    assert found.ridge == exact.ridge and 0 < exact.strength < 1
    assert found.strength == pytest.approx(exact.strength, rel=1e-9)
    assert found.before == exact.before and found.after == pytest.approx(exact.after, rel=1e-9)
    # The step itself is that of all outputs, in fp64.
    step = (exact.W - W) / exact.strength
    torch.testing.assert_close(found.W, W + found.strength * step)
    assert found.after == pytest.approx(others.relative_loss(found.W), rel=1e-9)


def test_a_correction_has_no_unit():
    W, *moments = wide_problem(192)
    quiet = [type(m)(*(part * 2.0**-40 for part in m)) for m in moments]
    loud, soft = correct(W, *moments), correct(W, *quiet)
    assert soft.strength == loud.strength > 0 and torch.equal(soft.W, loud.W) and soft.after == loud.after


def test_a_correction_takes_little_beside_the_moments():
    """One (F, F), and a few (D, F): no copy of a moment or a factor, and one step at a time."""
    W, fit, others = wide_problem(256, 64, 64)
    grown = peak_bytes(lambda: correct(W, fit, others))
    assert grown < 1.05 * fit.C.nbytes + 5.2 * W.nbytes


@pytest.mark.parametrize("unit", [1.0, 2.0**-20])
def test_the_refit_across_heads_is_the_regression_on_what_the_reduced_heads_send(unit):
    g = torch.Generator().manual_seed(0)
    H, N, R, D, ridge = 3, 6, 4, 7, 1e-3
    z = torch.randn(400, H * N, generator=g, dtype=F64) @ torch.randn(H * N, H * N, generator=g, dtype=F64) * unit
    W, down = torch.randn(D, H * N, generator=g, dtype=F64), torch.randn(H, R, N, generator=g, dtype=F64)
    up = torch.linalg.pinv(down)
    found = refit_across_heads(W, z.T @ z / len(z), down, up, ridge=ridge)
    reduced = z @ torch.block_diag(*down).T
    prior = W @ torch.block_diag(*up)
    lam = ridge * reduced.square().mean(0).mean() * len(z)
    rows = torch.cat([reduced, lam.sqrt() * torch.eye(H * R, dtype=F64)])
    wanted = torch.cat([z @ W.T, lam.sqrt() * prior.T])
    torch.testing.assert_close(found.W, torch.linalg.lstsq(rows, wanted).solution.T, rtol=1e-6, atol=1e-8)
    error = (z @ W.T - reduced @ found.W.T).square().sum(1).mean().item()
    assert found.error(W, z.T @ z / len(z)) == pytest.approx(error, rel=1e-6)
    per_head = (z @ W.T - reduced @ prior.T).square().sum(1).mean().item()
    assert error < 0.9 * per_head  # heads tell of each other


def heads_that_send(values, **options):
    """Two heads of width 3, cut to 2, whose inputs have a diagonal moment."""
    g = torch.Generator().manual_seed(0)
    W, down = torch.randn(4, 6, generator=g, dtype=F64), torch.randn(2, 2, 3, generator=g, dtype=F64)
    up = torch.linalg.pinv(down)
    return refit_across_heads(W, torch.diag(torch.tensor(values, dtype=F64)), down, up, **options), W, down, up


def test_heads_that_send_nothing_keep_what_each_has_alone():
    found, W, down, up = heads_that_send([0.0] * 6, ridge=1e-4)
    torch.testing.assert_close(found.W, W @ torch.block_diag(*up))
    assert torch.equal(found.down, down) and found.error(W, torch.zeros(6, 6, dtype=F64)) == 0.0


def test_a_moment_that_is_none_is_refused_with_a_remedy():
    with pytest.raises(torch.linalg.LinAlgError, match="2 heads of width 2 .* not positive definite; raise the ridge"):
        heads_that_send([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], ridge=1e-4)
