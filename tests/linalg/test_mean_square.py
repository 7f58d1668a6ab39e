"""The predicted mean square against least squares on raw rows, with every set of factors held at their bounds tried."""

import itertools

import pytest
import torch
from problems import KINDS, activations
from torch import Tensor

from rankfold.linalg.mean_square import fit_mean_square, mean_square_error, nonnegative_fit, square_features

EPS, RIDGE = 1e-3, 1e-2
KEPT = [[0], [5, 2], [0, 2, 3, 7], [1, 2, 3, 4, 5, 6]]


def moment(x: Tensor) -> Tensor:
    features = square_features(x, EPS)
    return features.mT @ features / len(x)


def by_every_support(A: Tensor, b: Tensor) -> Tensor:
    """``x >= 0`` with the least ``|A x - b|``: the best of the free fits on sets of columns that are non-negative."""
    best, least = torch.zeros(A.shape[1], dtype=A.dtype), b.square().sum()
    for size in range(1, A.shape[1] + 1):
        for chosen in itertools.combinations(range(A.shape[1]), size):
            x = torch.linalg.lstsq(A[:, chosen], b).solution
            loss = (A[:, chosen] @ x - b).square().sum()
            if (x >= 0).all() and loss < least:
                best, least = torch.zeros(A.shape[1], dtype=A.dtype).index_copy(0, torch.tensor(chosen), x), loss
    return best


def reference(x: Tensor, keep: list[int]) -> tuple[Tensor, Tensor]:
    """Factors of the kept squares, and the constant, by rows of relative squares and rows that damp."""
    N, mean = x.shape[1], x.square().mean(1) + EPS
    known = x[:, keep].square().sum(1) / N + EPS
    columns = torch.cat([x[:, keep].square(), torch.ones(len(x), 1, dtype=x.dtype)], 1) / mean[:, None]
    damping = (RIDGE * columns.square().sum(0)).sqrt().diag()
    rows = torch.cat([columns, damping])
    target = torch.cat([(mean - known) / mean, torch.zeros(len(damping), dtype=x.dtype)])
    found = by_every_support(rows, target)
    return found[:-1] + 1 / N, found[-1] + EPS


@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("kind", KINDS)
def test_factors_are_the_non_negative_least_squares_fit_of_the_other_dimensions(kind, keep):
    x = activations(kind, 8)
    squares, constant = reference(x, keep)
    fit = fit_mean_square(moment(x), torch.tensor(keep), eps=EPS, ridge=RIDGE)
    torch.testing.assert_close(fit.squares, squares, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(fit.constant, constant, rtol=1e-5, atol=1e-9 * x.square().mean().item())


@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_that_of_the_predictions(kind, keep):
    x, other = activations(kind, 8), activations(kind, 8, seed=1)
    fit = fit_mean_square(moment(x), torch.tensor(keep), eps=EPS)

    def error(rows: Tensor) -> float:
        predicted = rows[:, keep].square() @ fit.squares + fit.constant
        return (1 - predicted / (rows.square().mean(1) + EPS)).square().mean().item()

    assert fit.error.item() == pytest.approx(error(x), rel=1e-6, abs=1e-14)
    there = mean_square_error(moment(other), torch.tensor(keep), fit.squares, fit.constant, eps=EPS)
    assert there.item() == pytest.approx(error(other), rel=1e-6, abs=1e-14)


def test_the_default_hardly_damps():
    some = activations("gaussian", 4)
    x = torch.cat([some, 2 * some], 1)  # the other half is known from this one
    assert fit_mean_square(moment(x), torch.arange(4), eps=EPS).error < 1e-9


def test_all_dimensions_give_the_mean_square_itself():
    x = activations("gaussian", 8)
    fit = fit_mean_square(moment(x), torch.arange(8).flip(0), eps=EPS)
    assert (fit.squares == 1 / 8).all() and fit.constant == EPS and fit.error == 0


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_normalised_exceeds_the_root_of_the_dimensions(kind):
    """Also of a token unlike all that were fitted: all its size in one kept dimension, or none."""
    fit = fit_mean_square(moment(activations(kind, 8)), torch.tensor([1, 4, 6]), eps=EPS)
    alone = torch.eye(3, dtype=torch.float64) * 1e6
    size = alone / (alone.square() @ fit.squares + fit.constant).sqrt()[:, None]
    assert (size <= 8**0.5).all() and (fit.constant >= EPS).all()


def test_heads_are_fitted_each_by_itself():
    heads = [activations(kind, 8, seed=i) for i, kind in enumerate(KINDS[:4])]
    keep = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(i))[:3] for i in range(4)])
    together = fit_mean_square(torch.stack([moment(x) for x in heads]), keep, eps=EPS)
    for i, x in enumerate(heads):
        for mine, theirs in zip(fit_mean_square(moment(x), keep[i], eps=EPS), together, strict=True):
            torch.testing.assert_close(theirs[i], mine, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("seed", range(20))
def test_non_negative_fits_hold_the_conditions_of_an_optimum(seed):
    """Of many variables, most of them at their bound: gradients are zero where ``x > 0`` and positive elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(60, 40, generator=generator, dtype=torch.float64)
    G, c = A.T @ A, A.T @ torch.randn(60, generator=generator, dtype=torch.float64)
    x = nonnegative_fit(G, c, ridge=1e-9)
    gradient = G @ x + 1e-9 * G.diagonal() * x - c
    assert (x >= 0).all() and 0 < (x > 0).sum() < 40
    torch.testing.assert_close(gradient[x > 0], torch.zeros_like(gradient[x > 0]), rtol=0, atol=1e-8)
    assert (gradient[x == 0] > -1e-8).all()


@pytest.mark.parametrize("keep", [[], [[0, 1]], list(range(9))])
def test_shapes_that_do_not_belong_together_are_refused(keep):
    with pytest.raises(ValueError, match="do not belong together"):
        fit_mean_square(moment(activations("gaussian", 8)), torch.tensor(keep, dtype=torch.long), eps=EPS)
