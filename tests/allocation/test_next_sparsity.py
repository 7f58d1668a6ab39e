"""The sparsity that loses so much and no more."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankfold._utils.sizes import parse_size, size_text
from rankfold.allocation import LEAST, Lost, guessed_loss, next_sparsity
from rankfold.allocation.quality import NEAR, RUNS
from rankfold.errors import OptionError


def searched(curve, true_loss, allowed) -> list[Lost]:
    runs: list[Lost] = []
    while (sparsity := next_sparsity(curve, runs, allowed)) is not None:
        runs.append(Lost(sparsity, true_loss(sparsity)))
    return runs


@given(
    quality=st.floats(0.3, 0.98),
    scale=st.floats(0.2, 5.0),
    power=st.floats(0.7, 1.5),
)
def test_a_curve_of_another_size_and_shape_ends_near_and_within(quality, scale, power):
    allowed = -math.log(quality)
    runs = searched(guessed_loss, lambda s: scale * guessed_loss(s) ** power, allowed)
    assert len(runs) <= RUNS
    kept = [run for run in runs if run.is_within(allowed)]
    assert kept and max(run.loss for run in kept) >= NEAR * allowed


def test_a_true_curve_takes_one_run():
    (run,) = searched(guessed_loss, guessed_loss, 0.1)
    assert run.loss == pytest.approx(0.09, rel=1e-2)


def test_what_loses_too_much_at_any_sparsity_is_tried_once_at_the_least():
    runs = searched(guessed_loss, lambda s: 1.0, 0.1)
    assert runs[-1].sparsity == LEAST and len(runs) <= RUNS


def test_what_loses_nothing_goes_to_the_end_of_what_can_be_reached():
    runs = searched(lambda s: guessed_loss(s) if s <= 0.5 else math.inf, lambda s: -0.01, 0.1)
    assert runs[-1].sparsity == pytest.approx(0.5, abs=1e-3) and len(runs) <= RUNS


@pytest.mark.parametrize("scale", [0.1, 0.03, 0.01])
@pytest.mark.parametrize("quality", [0.95, 0.8])
def test_what_loses_much_less_than_expected_ends_near_and_within(scale, quality):
    """As opt-6m does, of which half can go."""
    allowed = -math.log(quality)
    runs = searched(guessed_loss, lambda s: -0.001 if s < 0.1 else scale * guessed_loss(s), allowed)
    assert len(runs) <= RUNS and NEAR * allowed <= max(run.loss for run in runs if run.is_within(allowed))


def test_a_jump_ends_at_the_run_before_it():
    runs = searched(guessed_loss, lambda s: 0.01 if s < 0.1 else 0.3, 0.1)
    assert len(runs) <= RUNS and any(run.is_within(0.1) for run in runs)


@pytest.mark.parametrize(("flat", "steep", "edge"), [(0.01, 20, 0.5), (0.02, 12, 0.6)])
def test_what_is_flat_and_then_steep_comes_near_its_edge(flat, steep, edge):
    def lost(s: float) -> float:
        return flat * guessed_loss(s) + math.exp(steep * (s - edge))

    runs = searched(guessed_loss, lost, math.log(2))
    best = max(run.sparsity for run in runs if run.is_within(math.log(2)))
    assert lost(best / 0.9) > math.log(2) and len(runs) <= RUNS


def test_sizes_as_people_write_them():
    known = {"400MB": 400_000_000, "1.5GiB": 3 * 2**29, "7": 7, 7: 7, "2 kB": 2000, "3k": 3000, "1gb": 10**9, "9B": 9}
    assert {text: parse_size(text) for text in known} == known
    assert [size_text(n) for n in (999, 1500, 2.5e6, 3e9)] == ["999 bytes", "1.50 kB", "2.50 MB", "3.00 GB"]
    assert [size_text(n) for n in (999_994, 999_996, 999_999_999)] == ["999.99 kB", "1.00 MB", "1.00 GB"]
    for wrong in ("", "0MB", "0.5", "0.0001kB", "-1", "400 bytes", "MB", "1e9", True):
        with pytest.raises(OptionError, match="target_size takes a size above 0, such as 400MB"):
            parse_size(wrong)
