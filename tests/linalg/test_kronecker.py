"""Removing rows and columns under a Kronecker-factored Fisher, against dense products and constrained least squares."""

import pytest
import torch
from torch import Tensor

from rankfold.linalg.kronecker import compensated, diagonal_blocks, row_costs, schur_blocks, with_bias, with_one
from rankfold.linalg.psd import damped

O, N = 6, 4
UNITS = {
    "single": torch.arange(O)[:, None],
    "pairs": torch.tensor([[0, 3], [1, 4], [2, 5]]),
    "all": torch.arange(O)[None],
}


@pytest.fixture
def problem():
    torch.manual_seed(0)
    g, x = torch.randn(50, O).double(), torch.randn(50, N).double()
    g[:, 0] += 0.9 * g[:, 1]  # rows that can stand for each other
    return torch.randn(O, N), g.T @ g / 50, x.T @ x / 50


def quadratic(change: Tensor, G: Tensor, A: Tensor) -> float:
    """``d^T (G (x) A) d / 2`` of the dense product, ``d`` the change row by row."""
    d = change.double().flatten()
    return (d @ torch.kron(G, A) @ d / 2).item()


def cheapest(W: Tensor, G: Tensor, A: Tensor, rows: Tensor) -> Tensor:
    """The change that takes these rows to zero and costs least, by the optimality conditions of the dense problem."""
    F = torch.kron(G, A)
    fixed = (rows[:, None] * N + torch.arange(N)).flatten()
    pick = torch.eye(O * N, dtype=torch.float64)[fixed]
    system = torch.cat([torch.cat([F, pick.T], 1), torch.cat([pick, F.new_zeros(len(fixed), len(fixed))], 1)])
    target = torch.cat([F.new_zeros(O * N), -W.double().flatten()[fixed]])
    return torch.linalg.solve(system, target)[: O * N].view(O, N)


@pytest.mark.parametrize("index", UNITS.values(), ids=UNITS)
def test_zeroed_rows_cost_what_the_dense_product_says(problem, index):
    W, G, A = problem
    found = row_costs(W[index], A, diagonal_blocks(G, index))
    for rows, cost in zip(index, found.tolist(), strict=True):
        change = torch.zeros_like(W)
        change[rows] = -W[rows]
        assert cost == pytest.approx(quadratic(change, G, A), rel=1e-6)


@pytest.mark.parametrize("index", [UNITS["single"], UNITS["pairs"]], ids=["single", "pairs"])
def test_removed_rows_cost_what_is_left_after_the_best_change_of_the_others(problem, index):
    W, G, A = problem
    found = row_costs(W[index], A, schur_blocks(G, index))
    for rows, cost in zip(index, found.tolist(), strict=True):
        assert cost == pytest.approx(quadratic(cheapest(W, G, A, rows), G, A), rel=1e-6)
        assert cost < quadratic(torch.zeros_like(W).index_copy(0, rows, -W[rows]), G, A)


@pytest.mark.parametrize("drop", [[1], [0, 4], [0, 1, 2, 3, 4]])
def test_rows_that_stay_change_so_that_the_loss_is_least(problem, drop):
    W, G, A = problem
    drop = torch.tensor(drop)
    keep = torch.tensor([i for i in range(O) if i not in drop])
    found = compensated(W, G, keep, drop)
    torch.testing.assert_close(found, (W + cheapest(W, G, A, drop))[keep])


def test_columns_are_rows_of_the_transpose(problem):
    """A column of ``W`` and the least squares over raw inputs that stands for it."""
    W, _, _ = problem
    torch.manual_seed(1)
    X = torch.randn(40, N).double() @ torch.randn(N, N).double()
    keep, drop = torch.tensor([0, 2]), torch.tensor([1, 3])
    wanted = torch.linalg.lstsq(X[:, keep], X @ W.double().T).solution.T
    torch.testing.assert_close(compensated(W.T, X.T @ X / 40, keep, drop).T, wanted)


def test_a_bias_is_a_column_that_meets_ones():
    torch.manual_seed(0)
    W, b, X = torch.randn(O, N), torch.randn(O), torch.randn(30, N).double()
    whole, A = with_bias(W, b), with_one(X.T @ X / 30, X.mean(0))
    Y = X @ W.double().T + b.double()
    torch.testing.assert_close(whole @ A @ whole.T, Y.T @ Y / 30)
    torch.testing.assert_close(with_bias(W, None), torch.cat([W, torch.zeros(O, 1)], 1).double())


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_damping_is_relative(problem, scale):
    _, G, _ = problem
    wanted = G + 0.01 * G.diagonal().mean() * torch.eye(O)
    torch.testing.assert_close(damped(G * scale, 0.01), wanted * scale)


def test_a_factor_of_nothing_tells_no_direction_from_another():
    assert torch.equal(damped(torch.zeros(3, 3), 0.01), torch.eye(3))


def test_what_is_not_positive_definite_is_named(problem):
    W, _, _ = problem
    keep, drop = torch.tensor([0, 1]), torch.tensor([2, 3, 4, 5])
    bad = torch.diag(torch.tensor([1.0, -1, 1, 1, 1, 1])).double()
    for call in (lambda: schur_blocks(bad, UNITS["single"]), lambda: compensated(W, bad, keep, drop)):
        with pytest.raises(
            torch.linalg.LinAlgError, match=r"Fisher factor \(6, 6\) is not positive definite; use more"
        ):
            call()
    with pytest.raises(ValueError, match="the Fisher factor has non-finite entries"):
        damped(bad / 0, 0.01, name="the Fisher factor")
