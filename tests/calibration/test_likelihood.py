"""Standard errors against repeated draws, and what counts as guessing."""

import logging
import math

import pytest
import torch

from rankfold.calibration.likelihood import PIECE, compare_losses, guesses, warn_of_guessing
from rankfold.compression.held_out import explained_ratio, is_damaged

LENGTHS = (60, 90, 120, 30, 75)


def drawn(generator, lengths, *, common: float, gap: float = 0.1):
    """Losses of two models: tokens that are hard for both, and windows of which the smaller model loses more."""
    dense, small = [], []
    for length in lengths:
        hard = 3 * torch.rand(length, generator=generator)
        shift = gap + common * torch.randn((), generator=generator)
        dense.append(hard)
        small.append(hard + shift + 0.5 * torch.randn(length, generator=generator))
    return dense, small


@pytest.mark.parametrize(
    ("lengths", "common"), [(LENGTHS * 3, 0.2), (LENGTHS * 3, 0.0), ((800,), 0.0), ((200, 300), 0.0)]
)
def test_the_standard_error_is_the_spread_of_repeated_measurements(lengths, common):
    """Of many windows, whose tokens need not be independent, and of pieces of one or two."""
    generator = torch.Generator().manual_seed(0)
    found = [compare_losses(*drawn(generator, lengths, common=common)) for _ in range(600)]
    spread = torch.tensor([one.difference for one in found]).std().item()
    expected = math.sqrt(sum(one.standard_error**2 for one in found) / len(found))
    assert expected == pytest.approx(spread, rel=0.12)
    assert sum(one.difference for one in found) / len(found) == pytest.approx(0.1, abs=0.02)


def test_means_weigh_tokens_and_not_windows():
    dense, small = [torch.zeros(10), torch.zeros(30)], [torch.ones(10), torch.full((30,), 2.0)]
    found = compare_losses(dense, small)
    assert (found.dense, found.compressed, found.difference, found.tokens) == (0.0, 1.75, 1.75, 40)


def test_of_windows_of_one_length_it_is_the_classical_standard_error():
    gaps = torch.tensor([0.1, 0.7, 0.2, 0.4, 0.5])
    found = compare_losses([torch.zeros(20)] * 5, [gap.expand(20) for gap in gaps])
    assert found.standard_error == pytest.approx(gaps.std().item() / math.sqrt(5), rel=1e-6)


def test_losses_that_both_models_share_add_no_error():
    hard = [5 * torch.rand(64, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    found = compare_losses(hard, [losses + 0.25 for losses in hard])
    assert found.difference == pytest.approx(0.25) and found.standard_error == pytest.approx(0.0, abs=1e-7)


def test_of_a_single_observation_there_is_no_error_and_no_verdict():
    found = compare_losses([torch.zeros(PIECE)], [torch.full((PIECE,), 9.0)])
    assert found.standard_error is None and not is_damaged(found, 0.1)


@pytest.mark.parametrize(
    ("ratio", "error", "sparsity", "damaged"),
    [
        (7.90 / 7.82, 0.01, 0.0034, False),  # one short window: more than (1 - 0.0034)^-3, and nothing at all
        (1.3, 0.02, 0.0034, True),
        (1.3, 0.2, 0.0034, False),  # may be noise
        (5.5, 0.1, 0.3, True),
        (2.8, 0.01, 0.3, False),
        (float("nan"), 0.1, 0.3, True),
    ],
)
def test_a_model_is_damaged_beyond_what_the_sparsity_and_the_noise_explain(ratio, error, sparsity, damaged):
    noise = error * torch.tensor([1.0, -1.0] * 8)
    gaps = math.log(ratio) + noise * math.sqrt(15)  # sixteen windows whose mean has this standard error
    found = compare_losses([torch.zeros(8)] * 16, [gap.expand(8) for gap in gaps])
    assert math.isnan(ratio) or found.standard_error == pytest.approx(error, rel=1e-3)
    assert is_damaged(found, sparsity) == damaged
    assert explained_ratio(sparsity) >= 1.05


@pytest.mark.parametrize("vocabulary", [96, 512, 50_000])
def test_a_perplexity_about_the_vocabulary_is_guessing(vocabulary, caplog):
    for nats in (math.log(vocabulary), math.log(vocabulary) + 9, float("nan"), float("inf")):
        assert guesses(nats, vocabulary)
    assert not guesses(math.log(vocabulary / 2) - 1e-6, vocabulary) and not guesses(1.0, vocabulary)
    with caplog.at_level(logging.WARNING):
        warning = warn_of_guessing(math.log(5e6), vocabulary, "text.txt")
        assert warn_of_guessing(1.0, vocabulary, "text.txt") is None
    assert caplog.messages == [warning]
    assert "text.txt" in warning and "5,000,000" in warning and f"{vocabulary:,} tokens" in warning
    assert "encoding" in warning and "tokenizer" in warning and "weights" in warning
