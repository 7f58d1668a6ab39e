"""Shares of blocks by outliers and by spectrum, against counting, an SVD, and the formulas of the papers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankfold.allocation.owl import outlier_fraction, outlier_sparsities
from rankfold.allocation.spectrum import effective_rank, spectrum_sparsities

SIZES = torch.tensor([4.0, 1.0, 3.0, 2.0], dtype=torch.float64)


def test_outliers_are_counted_over_all_layers_of_a_block():
    torch.manual_seed(0)
    inputs = [torch.randn(50, 6, dtype=torch.float64) * torch.tensor([1, 1, 1, 9, 1, 1.0]), torch.randn(50, 4).double()]
    weights = [torch.randn(5, 6), torch.randn(3, 4) / 4]
    scores = [
        abs(W[i, j].item()) * (X[:, j] ** 2).mean().sqrt().item()
        for W, X in zip(weights, inputs, strict=True)
        for i in range(len(W))
        for j in range(W.shape[1])
    ]
    found = {}
    for factor in (1.0, 3.0, 5.0):
        expected = sum(s > factor * sum(scores) / len(scores) for s in scores) / len(scores)
        found[factor] = outlier_fraction(weights, [X.square().mean(0) for X in inputs], factor)
        assert found[factor] == pytest.approx(expected)
    assert 0 < found[5.0] < found[3.0] < found[1.0]


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_the_effective_rank_is_that_of_the_singular_values(shape):
    torch.manual_seed(1)
    W = torch.randn(shape, dtype=torch.float64) * torch.logspace(0, -2, shape[1], dtype=torch.float64)
    sigma = torch.linalg.svdvals(W)
    p = (sigma / sigma.sum()).tolist()
    alone = math.exp(-sum(x * math.log(x) for x in p)) / 4
    assert effective_rank([W]) == pytest.approx(alone)
    other = torch.eye(8, dtype=torch.float64)
    assert effective_rank([W, other]) == pytest.approx((24 * alone + 64) / 88)


def test_the_effective_rank_of_special_layers():
    assert effective_rank([torch.eye(5)]) == pytest.approx(1.0)
    assert effective_rank([torch.ones(5, 5)]) == pytest.approx(0.2, abs=1e-4)
    assert effective_rank([torch.zeros(5, 5)]) == 0.0


def test_sparsities_fall_with_outliers_over_twice_the_spread():
    fractions = torch.tensor([0.02, 0.05, 0.03, 0.02], dtype=torch.float64)
    found = outlier_sparsities(fractions, SIZES, 0.5, 0.08)
    scaled = [0.0, 0.16, 0.16 / 3, 0.0]
    mean = sum(w * s for w, s in zip(SIZES.tolist(), scaled, strict=True)) / 10
    assert found.tolist() == pytest.approx([0.5 + mean - s for s in scaled])


def test_what_is_kept_is_proportional_to_the_effective_rank():
    ranks = torch.tensor([0.6, 0.8, 0.7, 0.65], dtype=torch.float64)
    found = spectrum_sparsities(ranks, SIZES, 0.4)
    kept = (1 - found) / ranks
    torch.testing.assert_close(kept, kept[0].expand(4))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1), min_size=4, max_size=4), st.floats(0, 0.95), st.floats(0, 0.5))
def test_the_mean_is_met_and_nobody_gains(values, average, spread):
    values = torch.tensor(values, dtype=torch.float64)
    for found in (outlier_sparsities(values, SIZES, average, spread), spectrum_sparsities(values, SIZES, average)):
        assert (found * SIZES).sum() / 10 == pytest.approx(average, abs=1e-9)
        assert found.min() >= -1e-12
        order = values.argsort()
        assert (found[order].diff() <= 1e-9).all()


def test_blocks_that_are_alike_lose_alike():
    same = torch.full((4,), 0.3, dtype=torch.float64)
    for found in (outlier_sparsities(same, SIZES, 0.4, 0.1), spectrum_sparsities(same, SIZES, 0.4)):
        assert found.tolist() == pytest.approx([0.4] * 4)
