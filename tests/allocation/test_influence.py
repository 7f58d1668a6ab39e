"""Sparsities from scores: Eq. 11 against its optimality conditions, exact averages, caps."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankfold.allocation.influence import softmax_sparsities, temperature_for
from rankfold.allocation.sparsities import capped_sparsities
from rankfold.errors import OptionError

F64 = torch.float64
LAYERS = st.integers(2, 12)
SEEDS = st.integers(0, 10**5)


def draw(seed: int, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores in [0, 1) and parameter counts."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(layers, generator=g, dtype=F64), 1 + 9 * torch.rand(layers, generator=g, dtype=F64)


def mean(phi, weights) -> float:
    return ((phi * weights).sum() / weights.sum()).item()


@settings(max_examples=40, deadline=None)
@given(SEEDS, LAYERS, st.floats(0, 0.9), st.floats(0.01, 100))
def test_weighted_mean_is_the_average(seed, layers, average, epsilon):
    s, w = draw(seed, layers)
    assert mean(softmax_sparsities(s, w, average, epsilon), w) == pytest.approx(average, abs=1e-12)


def test_equal_weights_are_equation_11():
    s, w = draw(0, 6)[0], torch.ones(6, dtype=F64)
    torch.testing.assert_close(softmax_sparsities(s, w, 0.3, 0.2), 6 * 0.3 * torch.softmax(-s / 0.2, 0))


@settings(max_examples=40, deadline=None)
@given(SEEDS, LAYERS, st.floats(0.05, 0.9), st.floats(0.05, 10))
def test_less_influential_layers_are_sparser(seed, layers, average, epsilon):
    s, w = draw(seed, layers)
    phi = softmax_sparsities(s, w, average, epsilon)
    assert (phi[s.argsort()].diff() <= 0).all()


@settings(max_examples=40, deadline=None)
@given(SEEDS, LAYERS, st.floats(0.05, 0.9), st.floats(0.05, 10))
def test_equation_10_is_maximised(seed, layers, average, epsilon):
    """``sum s_i (1 - phi_i) + eps H(phi)`` falls in every direction that keeps the plain mean (Theorem 4)."""
    s, w = draw(seed, layers)[0], torch.ones(layers, dtype=F64)
    phi = softmax_sparsities(s, w, average, epsilon)

    def objective(x):
        return (s * (1 - x)).sum() - epsilon * torch.special.xlogy(x, x).sum()

    step = torch.randn(layers, generator=torch.Generator().manual_seed(seed), dtype=F64)
    step -= step.mean()
    step *= 0.3 * phi.min() / step.abs().max()
    assert objective(phi) >= max(objective(phi + step), objective(phi - step)) - 1e-12 * layers


def test_temperature_goes_from_uniform_to_winner_takes_all():
    s, w = torch.tensor([0.1, 0.2, 0.9], dtype=F64), torch.ones(3, dtype=F64)
    torch.testing.assert_close(softmax_sparsities(s, w, 0.3, 1e9), torch.full((3,), 0.3, dtype=F64))
    torch.testing.assert_close(softmax_sparsities(s, w, 0.3, 1e-3), torch.tensor([0.9, 0, 0], dtype=F64))


@settings(max_examples=20, deadline=None)
@given(SEEDS, LAYERS, st.floats(-5, 5))
def test_a_shift_of_all_scores_changes_nothing(seed, layers, shift):
    s, w = draw(seed, layers)
    torch.testing.assert_close(softmax_sparsities(s, w, 0.3, 0.1), softmax_sparsities(s + shift, w, 0.3, 0.1))


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(4, 12), st.floats(0.25, 0.7))
def test_epsilon_rule_makes_the_largest_sparsity_080(seed, layers, average):
    s, w = draw(seed, layers)[0], torch.ones(layers, dtype=F64)
    epsilon = temperature_for(s, w, average)
    largest = softmax_sparsities(s, w, average, epsilon).max().item()
    coldest = 1e-3 * (s.max() - s.min()).item()
    assert largest == pytest.approx(0.8, abs=1e-6) or (largest < 0.8 and epsilon == pytest.approx(coldest))


def test_epsilon_rule_stops_where_scores_nearly_tie():
    s, w = torch.tensor([0.1, 0.1004, 0.5, 0.8], dtype=F64), torch.ones(4, dtype=F64)
    epsilon = temperature_for(s, w, 0.25)
    assert epsilon == pytest.approx(0.0007)
    assert 0.5 < softmax_sparsities(s, w, 0.25, epsilon).max().item() < 0.8


def test_epsilon_rule_takes_weights_and_another_largest():
    s, w = draw(3, 8)
    epsilon = temperature_for(s, w, 0.3, largest=0.5)
    assert softmax_sparsities(s, w, 0.3, epsilon).max().item() == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(
    ("scores", "average"), [([0.5, 0.5, 0.5], 0.3), ([0.1, 0.5, 0.9], 0.8), ([0.1, 0.5, 0.9], 0.0), ([0.2], 0.3)]
)
def test_epsilon_rule_is_uniform_where_it_cannot_say_anything(scores, average):
    s = torch.tensor(scores, dtype=F64)
    epsilon = temperature_for(s, torch.ones_like(s), average)
    assert math.isinf(epsilon)
    torch.testing.assert_close(softmax_sparsities(s, torch.ones_like(s), average, epsilon), torch.full_like(s, average))


@settings(max_examples=60, deadline=None)
@given(SEEDS, LAYERS, st.floats(0, 0.95), st.sampled_from([0.01, 0.1, 1.0, 10.0]))
def test_caps_hold_and_the_average_is_met(seed, layers, filled, epsilon):
    s, w = draw(seed, layers)
    caps = torch.rand(layers, generator=torch.Generator().manual_seed(seed + 1), dtype=F64)
    average = filled * mean(caps, w)
    phi = capped_sparsities(softmax_sparsities(s, w, average, epsilon), w, average, caps)
    assert ((phi >= 0) & (phi <= caps + 1e-12)).all()
    assert mean(phi, w) == pytest.approx(average, abs=1e-9)


def test_what_is_cut_off_goes_to_the_others_in_proportion():
    phi, w = torch.tensor([0.9, 0.2, 0.1], dtype=F64), torch.ones(3, dtype=F64)
    out = capped_sparsities(phi, w, 0.4, torch.tensor([0.6, 0.9, 0.9], dtype=F64))
    torch.testing.assert_close(out, torch.tensor([0.6, 0.4, 0.2], dtype=F64))
    assert phi.tolist() == [0.9, 0.2, 0.1]


def test_redistribution_goes_on_where_it_fills_another_cap():
    phi, w = torch.tensor([1.2, 0.4, 0.1], dtype=F64), torch.ones(3, dtype=F64)
    out = capped_sparsities(phi, w, 1.7 / 3, torch.tensor([0.7, 0.6, 0.9], dtype=F64))
    torch.testing.assert_close(out, torch.tensor([0.7, 0.6, 0.4], dtype=F64))


def test_nothing_changes_below_the_caps():
    phi, w = torch.tensor([0.5, 0.1], dtype=F64), torch.tensor([1.0, 3.0], dtype=F64)
    torch.testing.assert_close(capped_sparsities(phi, w, 0.2, torch.ones(2, dtype=F64)), phi)


def test_average_is_met_where_the_others_have_underflowed_to_zero():
    """A cold softmax gives the rest exactly 0, which no proportion raises; what is cut off must still go somewhere."""
    s, w = torch.tensor([0.0, 1.0, 1.0], dtype=F64), torch.ones(3, dtype=F64)
    phi = softmax_sparsities(s, w, 0.4, 1e-4)
    assert phi.tolist() == pytest.approx([1.2, 0, 0])
    out = capped_sparsities(phi, w, 0.4, torch.full((3,), 0.9, dtype=F64))
    assert mean(out, w) == pytest.approx(0.4)
    assert (out <= 0.9).all()


def test_an_average_that_fills_all_caps_is_reached():
    w, caps = torch.tensor([3.0, 1.0, 7.0], dtype=F64), torch.tensor([0.3, 0.7, 0.1], dtype=F64)
    average = mean(caps, w)
    out = capped_sparsities(torch.full((3,), average, dtype=F64), w, average, caps)
    torch.testing.assert_close(out, caps, rtol=1e-9, atol=1e-9)


def test_an_average_beyond_the_caps_says_what_can_be_reached():
    w = torch.ones(2, dtype=F64)
    phi = torch.full((2,), 0.7, dtype=F64)
    with pytest.raises(OptionError, match=r"average sparsity of 0\.7 cannot be reached .* the most is 0\.6000\. Lower"):
        capped_sparsities(phi, w, 0.7, torch.tensor([0.5, 0.7], dtype=F64))
    caps = torch.tensor([0.5, 0.61119], dtype=F64)  # 0.555595 on average
    with pytest.raises(OptionError, match=r"average sparsity of 0\.55561 cannot .* the most is 0\.5555\. Lower"):
        capped_sparsities(phi, w, 0.55561, caps)
    capped_sparsities(phi, w, 0.5555, caps)
