"""The studies on random matrices: their two-sided solver and their losses, against explicit norms and least squares."""

import importlib
import math
from pathlib import Path

import pytest
import torch

from rankfold.linalg.sparse import hard_shrink

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
G, O, N = 2, 3, 5


@pytest.fixture(scope="module", autouse=True)
def importable():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield


def positive(*shape: int) -> torch.Tensor:
    X = torch.randn(*shape, 4 * shape[-1], dtype=torch.float64)
    return X @ X.mT


def problem():
    torch.manual_seed(0)
    M, C, W = positive(G, O), positive(N), torch.randn(G, O, N, dtype=torch.float64)
    solver = importlib.import_module("two_sided").TwoSided(M, C, M @ W @ C, (M @ W @ C * W).sum())
    return solver, M, C, W


def explicit(M, C, gap) -> torch.Tensor:
    return sum(
        (torch.linalg.cholesky(m).T @ d @ torch.linalg.cholesky(C)).square().sum() for m, d in zip(M, gap, strict=True)
    )


def test_the_loss_is_the_weighted_norm_of_what_is_missing():
    solver, M, C, W = problem()
    X = torch.randn_like(W)
    torch.testing.assert_close(solver.loss(X * solver.size), explicit(M, C, W - X) / explicit(M, C, W))


def test_values_on_a_support_are_the_least_squares_ones():
    solver, M, C, W = problem()
    mask = hard_shrink(torch.randn_like(W), 11) != 0
    found = solver.refit(mask * torch.ones_like(W), steps=200) / solver.size
    for g in range(G):
        root = torch.kron(torch.linalg.cholesky(M[g]).T.contiguous(), torch.linalg.cholesky(C).T.contiguous())
        free = mask[g].flatten()
        values = torch.linalg.lstsq(root[:, free], root @ W[g].flatten()).solution
        torch.testing.assert_close(found[g].flatten()[free], values)
        assert not found[g][~mask[g]].any()


def test_without_metrics_fista_and_hard_shrinkage_keep_the_largest_entries():
    W = torch.randn(1, O, N, dtype=torch.float64)
    eye = importlib.import_module("two_sided").TwoSided(
        torch.eye(O)[None].double(), torch.eye(N).double(), W, W.square().sum()
    )
    torch.testing.assert_close(eye.hard(torch.ones_like(W), 6), hard_shrink(W, 6))
    for D in eye.fista(steps=1):
        torch.testing.assert_close(D, hard_shrink(W, int((D != 0).sum())))


def test_fista_reaches_the_least_penalised_loss():
    """At the optimum the gradient of the loss balances the penalty: no larger anywhere than where a value is kept."""
    solver, *_ = problem()
    solver.refit = lambda X: X * solver.size
    *_, X = solver.fista(steps=3000, penalties=3)
    gradient = solver.descent(X).abs()
    assert gradient.max() <= gradient[X != 0].min() * (1 + 1e-4)


def test_sparse_queries_have_the_loss_of_the_scores():
    studies = importlib.import_module("random_matrices")
    torch.manual_seed(1)
    scores = studies.random_scores(studies.problem(12, 3))
    q, k = (hard_shrink(W, 60) for W in (scores.q, scores.k))
    solver = studies.side(scores.q, scores.k, k, scores.C)
    assert studies.db(solver.loss(q * solver.size).sqrt().item()) == pytest.approx(scores.db(q, k), abs=1e-6)
    root = torch.linalg.cholesky(scores.C)

    def energy(products) -> float:
        return sum((root.T @ product @ root).square().sum().item() for product in products)

    dense, kept = (list(a.mT @ b) for a, b in ((scores.q, scores.k), (q, k)))
    gap = [a - b for a, b in zip(dense, kept, strict=True)]
    assert scores.db(q, k) == pytest.approx(10 * math.log10(energy(gap) / energy(dense)), abs=1e-6)


@pytest.mark.parametrize("figure", [7, 9, 12])
def test_a_figure_is_written_and_goes_on(figure, tmp_path, monkeypatch):
    studies = importlib.import_module("random_matrices")
    out = tmp_path / "out.json"
    arguments = ["random_matrices.py", "--width", "24", "--heads", "3", "--json", str(out), "--figures", str(figure)]
    monkeypatch.setattr("sys.argv", arguments)
    studies.main()
    first = out.read_bytes()
    studies.main()
    assert out.read_bytes() == first and first.count(b'"curve"') >= 2
