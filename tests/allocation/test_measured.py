"""Ranks by cost: against every choice there is on small problems."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankfold.allocation.cheapest import cheapest, largest_sparsity
from rankfold.allocation.ranks import allocate, averages
from rankfold.errors import OptionError
from rankfold.methods import MoDeGPT, PrunableModule


def unit(block: int, module: str, full: int, per_rank: int, step: int = 8) -> PrunableModule:
    ranks = (*range(step, full, step), full)
    return PrunableModule(block, module, ranks, tuple(rank * per_rank for rank in ranks))


def convex(u: PrunableModule, draw: random.Random, power: float = 2.0) -> dict[int, float]:
    scale = draw.uniform(0.1, 10)
    return {rank: scale * (1 - rank / u.ranks[-1]) ** power for rank in u.ranks}


@given(st.integers(0, 10**6), st.floats(0.05, 0.65))
@settings(max_examples=60, deadline=None)
def test_no_choice_that_removes_as_much_costs_less_by_more_than_one_step(seed, sparsity):
    draw = random.Random(seed)
    units = [unit(0, "mlp", 40, 6), unit(0, "qk", 32, 4), unit(1, "mlp", 40, 6), unit(1, "qk", 32, 4)]
    costs = {(u.block, u.module): convex(u, draw, draw.uniform(1.2, 4)) for u in units}
    remove = int(sparsity * sum(u.dense for u in units))
    found = cheapest(units, costs, remove)

    def removed(ranks):
        return sum(u.dense - u.size(rank) for u, rank in zip(units, ranks, strict=True))

    def cost(ranks):
        return sum(costs[u.block, u.module][rank] for u, rank in zip(units, ranks, strict=True))

    mine = [found[u.block, u.module] for u in units]
    assert removed(mine) >= remove
    higher = [[*mine[:i], mine[i] + 8, *mine[i + 1 :]] for i, u in enumerate(units) if mine[i] < u.ranks[-1]]
    assert all(removed(ranks) < remove for ranks in higher)  # no module could have a rank step back
    # Curves are convex: greedy is optimal for what it removes, at most a step too much, before it gives that back.
    step = max(u.sizes[0] for u in units)
    choices = [c for c in itertools.product(*(u.ranks for u in units)) if removed(c) >= remove + step]
    assert cost(mine) <= min(cost(c) for c in choices) * (1 + 1e-9)
    exact = [c for c in itertools.product(*(u.ranks for u in units)) if removed(c) >= remove]
    assert cost(mine) >= min(cost(c) for c in exact) * (1 - 1e-9)


@given(st.integers(0, 10**6), st.floats(0.01, 5.0))
@settings(max_examples=100, deadline=None)
def test_curves_that_are_not_convex_are_taken_by_their_hull(seed, price):
    """At every price of a weight each module has one best rank, by looking at all of them.

    To remove as much as these do, these are the ranks.
    """
    draw = random.Random(seed)
    units = [unit(0, "mlp", 64, 6), unit(0, "qk", 48, 4), unit(1, "mlp", 64, 5), unit(1, "qk", 48, 3)]
    costs = {}
    for u in units:
        rising = sorted(draw.uniform(0, u.dense * 4) for _ in u.ranks[:-1])
        costs[u.block, u.module] = dict(zip(reversed(u.ranks), [0.0, *rising], strict=True))
    best = {}
    for u in units:
        cost = costs[u.block, u.module]
        best[u.block, u.module] = min(u.ranks, key=lambda rank, u=u, cost=cost: cost[rank] + price * u.size(rank))
    remove = sum(u.dense - u.size(best[u.block, u.module]) for u in units)
    assert cheapest(units, costs, remove) == best


def test_what_a_coarse_step_removed_too_much_goes_back_to_the_dearest():
    """One module has no rank between all and half; two have many. The best of all, by hand and by trying them."""
    units = [
        PrunableModule(0, "mlp", (1, 2), (10, 20)),
        *(PrunableModule(0, m, tuple(range(1, 11)), tuple(range(1, 11))) for m in "ab"),
    ]
    slopes = {"a": 0.1, "b": 0.2}
    costs = {(0, m): {rank: slope * (10 - rank) for rank in range(4, 11)} for m, slope in slopes.items()}
    costs[0, "mlp"] = {2: 0.0, 1: 10.0}
    for remove, a, b in ((13, 7, 10), (15, 5, 10), (18, 4, 8)):
        found = cheapest(units, costs, remove)
        assert found == {(0, "mlp"): 1, (0, "a"): a, (0, "b"): b}
        choices = itertools.product((1, 2), range(4, 11), range(4, 11))
        removing = [c for c in choices if 10 * (2 - c[0]) + 20 - c[1] - c[2] >= remove]
        by_cost = min(removing, key=lambda c: sum(costs[0, m][rank] for m, rank in zip(("mlp", *"ab"), c, strict=True)))
        assert tuple(found.values()) == by_cost


def test_dear_modules_stay_dense_and_cheap_ones_pay():
    units = [unit(0, "mlp", 80, 3), unit(1, "mlp", 80, 3)]
    curve = {rank: (1 - rank / 80) ** 2 for rank in units[0].ranks}
    costs = {(0, "mlp"): {rank: 1e4 * c for rank, c in curve.items()}, (1, "mlp"): curve}
    assert cheapest(units, costs, 96) == {(0, "mlp"): 80, (1, "mlp"): 48}


def test_a_kink_is_stepped_over():
    """Leaving 24 costs much, going on from there nothing: the hull goes straight to the end."""
    u = unit(0, "mlp", 32, 1)
    costs = {(0, "mlp"): {32: 0.0, 24: 1.0, 16: 1.0, 8: 1.0}, (1, "mlp"): {32: 0.0, 24: 0.4, 16: 0.9, 8: 1.6}}
    assert cheapest([u, unit(1, "mlp", 32, 1)], costs, 24) == {(0, "mlp"): 8, (1, "mlp"): 32}


def test_more_sparsity_never_gives_a_module_more():
    draw = random.Random(3)
    units = [unit(b, m, 64, 5) for b in range(4) for m in ("mlp", "qk", "vo")]
    costs = {(u.block, u.module): convex(u, draw) for u in units}
    total, before = sum(u.dense for u in units), None
    for percent in range(5, 80, 5):
        found = cheapest(units, costs, total * percent // 100)
        if before:
            assert sum(found[k] > before[k] for k in found) <= 1  # the one that gave its surplus back
        before = found


def test_costs_that_only_doubles_tell_apart_are_told_apart():
    units = [unit(block, "mlp", 16, 1) for block in range(2)]
    for cheap in range(2):
        costs = {(block, "mlp"): {16: 0.0, 8: 1.0 + (block != cheap) * 1e-9} for block in range(2)}
        assert cheapest(units, costs, 8)[cheap, "mlp"] == 8


def test_only_measured_ranks_are_taken_and_too_few_are_said():
    u = unit(0, "mlp", 32, 1)
    costs = {(0, "mlp"): {32: 0.0, 24: 1.0}}
    assert cheapest([u], costs, 8) == {(0, "mlp"): 24}
    with pytest.raises(OptionError, match="can lose 8 of the 9 weights"):
        cheapest([u], costs, 9)


def test_the_budget_and_the_protected_blocks_are_those_of_every_allocation():
    draw = random.Random(1)
    units = [unit(b, m, 64, 5) for b in range(3) for m in ("mlp", "qk", "vo")]
    costs = {(u.block, u.module): convex(u, draw) for u in units}
    counted = sum(u.dense for u in units)
    method = MoDeGPT(sparsity=0.3, allocation="measured", exclude_blocks=(1,))
    ranks, facts = allocate(units, method, counted, costs)
    removed = sum(u.dense - u.size(ranks[u.block, u.module]) for u in units)
    assert 0.3 * counted <= removed < 0.3 * counted + 40 and all(ranks[1, m] == 64 for m in ("mlp", "qk", "vo"))
    assert facts["divergence"].keys() == {f"{b}.{m}" for b in (0, 2) for m in ("mlp", "qk", "vo")}
    shares = averages(units, method, counted)
    assert shares.keys() == {(b, m) for b in (0, 2) for m in ("mlp", "qk", "vo")}
    assert all(share == pytest.approx(0.45, abs=0.01) for share in shares.values())


@pytest.mark.parametrize("average", [0.0, 0.3, 0.5, 0.9])
def test_curves_end_beyond_the_average(average):
    assert average <= largest_sparsity(average) < 1


def test_a_module_may_lose_what_three_cuts_in_a_row_by_the_average_would():
    assert largest_sparsity(0.5) == 0.875 and largest_sparsity(0.2) == pytest.approx(0.488)
