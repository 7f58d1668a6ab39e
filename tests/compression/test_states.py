"""How far states have moved, against plain definitions, and the standard error against many draws."""

import pytest
import torch

from rankfold.compression.states import compare_states


def states(samples: int, seed: int, noise: float = 0.5, length: int = 40, width: int = 6):
    generator = torch.Generator().manual_seed(seed)
    # Tokens of a sample are alike, so that a sample is one observation and not forty.
    common = torch.randn(samples, 1, width, generator=generator)
    dense = common + 0.3 * torch.randn(samples, length, width, generator=generator) + 2
    size = noise * torch.rand(samples, 1, 1, generator=generator)
    return dense, dense + size * torch.randn(samples, length, width, generator=generator)


def test_error_and_cosine_are_those_of_their_definitions_whatever_the_batches():
    dense, small = states(7, 0)
    a, b = dense.flatten(0, 1).double(), small.flatten(0, 1).double()
    error = ((a - b).square().sum() / (a - a.mean(0)).square().sum()).sqrt().item()
    found = compare_states([(dense[:3], small[:3]), (dense[3:], small[3:])])
    assert found.error == pytest.approx(error, rel=1e-9)
    assert found.cosine == pytest.approx(torch.nn.functional.cosine_similarity(a, b, dim=-1).mean().item(), rel=1e-9)
    whole = compare_states([(dense, small)])
    assert whole.standard_error == pytest.approx(found.standard_error, rel=1e-9)


def test_the_standard_error_is_the_spread_over_draws():
    found = [compare_states([states(32, seed)]) for seed in range(300)]
    spread = torch.tensor([one.error for one in found]).std().item()
    said = torch.tensor([one.standard_error for one in found]).mean().item()
    assert said == pytest.approx(spread, rel=0.15)


def test_few_samples_are_told_by_pieces_of_them_and_one_piece_by_nothing():
    dense, small = states(2, 0)
    assert compare_states([(dense, small)]).standard_error > 0
    assert compare_states([(dense[:1, :16], small[:1, :16])]).standard_error is None
    same = compare_states([(dense, dense)])
    assert (same.error, same.standard_error) == (0, None) and same.cosine == pytest.approx(1)
