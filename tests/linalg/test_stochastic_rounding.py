"""Stochastic rounding: unbiased, to a neighbour, and exact where nothing is to be rounded."""

import pytest
import torch

from rankfold.linalg.stochastic_rounding import round_stochastically


def draws(x, dtype, times):
    generator = torch.Generator().manual_seed(0)
    return torch.stack([round_stochastically(x, dtype, generator).float() for _ in range(times)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_over_draws_is_the_number(dtype):
    x = torch.randn(200, generator=torch.Generator().manual_seed(1)) * 0.1
    found = draws(x, dtype, 4000)
    unit = found.max(0).values - found.min(0).values
    assert ((found.mean(0) - x).abs() <= 5 * unit / 2 / 4000**0.5).all()  # five standard errors of a coin at the most
    assert ((x.to(dtype).float() - x).abs() > 5 * unit / 2 / 4000**0.5).float().mean() > 0.7  # the nearest one is off


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_draw_is_one_of_the_two_neighbours(dtype):
    x = torch.cat([torch.randn(100) * scale for scale in (1e-3, 1, 30)] + [2.0 ** torch.arange(-8, 8) * 0.9999])
    below_or_above = draws(x, dtype, 50)
    nearest = x.to(dtype)
    one_up, one_down = (
        torch.nextafter(nearest, torch.full_like(nearest, to)).float() for to in (torch.inf, -torch.inf)
    )
    low = torch.where(nearest.float() <= x, nearest.float(), one_down)
    high = torch.where(nearest.float() >= x, nearest.float(), one_up)
    assert ((below_or_above == low) | (below_or_above == high)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_the_dtype_holds_stays(dtype):
    x = torch.cat([torch.randn(500).to(dtype).float(), torch.tensor([0.0, -0.0, 1.0])])
    assert torch.equal(draws(x, dtype, 3), x.expand(3, -1))


def test_equal_seeds_draw_alike():
    x = torch.randn(1000)
    assert torch.equal(draws(x, torch.bfloat16, 2), draws(x, torch.bfloat16, 2))
    assert not torch.equal(*draws(x, torch.bfloat16, 2))


def test_beyond_the_range_is_infinite_as_for_the_nearest():
    assert draws(torch.tensor([1e6, -1e6]), torch.float16, 3).isinf().all()
