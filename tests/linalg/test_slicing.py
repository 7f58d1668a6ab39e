"""Keeping units as they are: scores and errors against loops over raw activations."""

import pytest
import torch

from rankfold.linalg.slicing import channels_of, evenly_spaced, fluctuation_scores, largest, lost_energy, norm_scores

n, c, D, T = 6, 3, 5, 40


@pytest.fixture
def problem():
    torch.manual_seed(0)
    return torch.randn(D, n * c), torch.randn(T, n * c) * torch.rand(n * c) + torch.randn(n * c)


def test_norms_are_of_all_weights_of_a_unit():
    torch.manual_seed(0)
    parts = [torch.randn(n, 4), torch.randn(n, 2, 3)]
    for i, score in enumerate(norm_scores(parts).tolist()):
        assert score == pytest.approx(sum(x**2 for part in parts for x in part[i].flatten().tolist()) ** 0.5)


def test_fluctuation_is_what_remains_about_the_mean_of_every_channel_alone(problem):
    W, X = problem
    found = fluctuation_scores(W, (X.double() - X.double().mean(0)).square().mean(0), n)
    for i in range(n):
        alone = [((X[:, [j]] - X[:, j].mean()) @ W[:, [j]].T).square().sum() / T for j in range(i * c, (i + 1) * c)]
        assert found[i].item() == pytest.approx(sum(alone).item(), rel=1e-5)


def test_the_largest_come_in_order_and_of_equal_ones_the_first():
    assert largest(torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0]), 3).tolist() == [1, 2, 3]


@pytest.mark.parametrize(("units", "rank", "places"), [(12, 4, [1, 4, 7, 10]), (5, 5, [0, 1, 2, 3, 4]), (7, 1, [3])])
def test_every_nth(units, rank, places):
    assert evenly_spaced(units, rank).tolist() == places


@pytest.mark.parametrize("units", range(1, 40))
def test_spacing_never_repeats_and_runs_differ_by_one_at_most(units):
    for rank in range(1, units + 1):
        places = evenly_spaced(units, rank)
        gaps = places.diff()
        assert len(places) == rank and places[0] >= 0 and places[-1] < units
        assert not len(gaps) or (gaps.min() >= 1 and gaps.max() - gaps.min() <= 1)


def test_energies_are_of_what_is_lost_and_of_what_was_sent(problem):
    W, X = problem
    lost = torch.randn(D, n * c)
    lost[:, channels_of(torch.tensor([1, 4]), c)] = 0
    assert lost.any(0).nonzero()[:, 0].tolist() == [0, 1, 2, 6, 7, 8, 9, 10, 11, 15, 16, 17]
    found = lost_energy(W, X.double().T @ X.double() / T, lost)
    for energy, matrix in zip(found, (lost, W), strict=True):
        assert energy.item() == pytest.approx((X @ matrix.T).square().sum(1).mean().item(), rel=1e-5)


def test_nothing_lost_is_no_energy(problem):
    W, X = problem
    assert lost_energy(W, X.double().T @ X.double() / T, torch.zeros_like(W))[0].item() == 0.0
