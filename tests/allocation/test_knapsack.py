"""The multiple-choice knapsack against every choice there is, and against itself under other budgets."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankfold.allocation.knapsack import Group, cheapest_options

COSTS = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 10))
OPTIONS = st.lists(st.tuples(st.integers(0, 40), COSTS), min_size=1, max_size=6)
PROBLEMS = st.lists(OPTIONS, min_size=1, max_size=4)


def groups_of(problem) -> list[Group]:
    return [
        Group(torch.tensor([r for r, _ in options]), torch.tensor([c for _, c in options], dtype=torch.float64))
        for options in problem
    ]


def outcome(problem, remove: int) -> tuple[int, float]:
    """What goes and what it costs."""
    choice = cheapest_options(groups_of(problem), remove)
    taken = [options[n] for options, n in zip(problem, choice, strict=True)]
    return sum(r for r, _ in taken), sum(c for _, c in taken)


def most(problem) -> int:
    return sum(max(r for r, _ in options) for options in problem)


@given(PROBLEMS, st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_no_choice_that_removes_as_much_costs_less(problem, share):
    remove = round(share * most(problem))
    removed, cost = outcome(problem, remove)
    choices = [(sum(r for r, _ in c), sum(v for _, v in c)) for c in itertools.product(*problem)]
    assert removed >= remove
    assert cost == pytest.approx(min(v for r, v in choices if r >= remove), rel=1e-9, abs=1e-12)


@given(PROBLEMS)
@settings(max_examples=40, deadline=None)
def test_a_tighter_budget_never_costs_less_and_never_leaves_more(problem):
    outcomes = [outcome(problem, remove) for remove in range(0, most(problem) + 1, 3)]
    for (removed, cost), (more, dearer) in itertools.pairwise(outcomes):
        assert more >= removed and dearer >= cost - 1e-9


def test_many_groups_against_the_table_of_all_sums():
    """Dynamic programming over every amount that can be removed: 40 groups of 30 options with kinks and plateaus."""
    draw = torch.Generator().manual_seed(5)
    problem = []
    for _ in range(40):
        steps = torch.randint(1, 9, (30,), generator=draw)
        rises = torch.rand(30, generator=draw, dtype=torch.float64) ** 6
        problem.append(list(zip(steps.cumsum(0).tolist(), rises.cumsum(0).tolist(), strict=True)))
    best = torch.zeros(1, dtype=torch.float64)
    for options in problem:
        new = torch.full((len(best) + max(r for r, _ in options),), torch.inf, dtype=torch.float64)
        for removed, cost in options:
            part = new[removed : removed + len(best)]
            torch.minimum(part, best + cost, out=part)
        best = new
    for share in (0.05, 0.3, 0.6, 0.95):
        remove = int(share * most(problem))
        assert outcome(problem, remove)[1] == pytest.approx(best[remove:].min().item(), rel=1e-12)


def test_of_equals_what_removes_most():
    assert outcome([[(0, 0.0), (5, 1.0), (9, 1.0)]], 4) == (9, 1.0)


def test_more_than_there_is_cannot_go():
    assert cheapest_options(groups_of([[(0, 0.0), (5, 1.0)]]), 6) is None
