"""The multiple-choice knapsack against every choice there is, and against itself under other budgets."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankfold.allocation import knapsack
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


@given(PROBLEMS, st.floats(0, 1), st.integers(0, 3), st.sampled_from([1e6, 1e14, 1e30]))
@settings(max_examples=150, deadline=None)
def test_a_group_that_costs_any_times_the_others_changes_no_choice_among_them(problem, share, dear, factor):
    """Of the same removal no other choice costs less, nor among the groups that cost little."""
    dear %= len(problem)
    scaled = [[(r, c * factor) for r, c in o] if i == dear else o for i, o in enumerate(problem)]
    remove = round(share * most(scaled))
    choice = cheapest_options(groups_of(scaled), remove)
    assert sum(o[n][0] for o, n in zip(scaled, choice, strict=True)) >= remove
    cost = sum(o[n][1] for o, n in zip(scaled, choice, strict=True))
    every = itertools.product(*(range(len(o)) for o in scaled))
    found = [
        (sum(o[n][0] for o, n in zip(scaled, c, strict=True)), sum(o[n][1] for o, n in zip(scaled, c, strict=True)))
        for c in every
    ]
    assert cost == pytest.approx(min(v for r, v in found if r >= remove), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("share", "cheap_alone"), [(0.3, True), (0.99, False)])
def test_a_few_dear_groups_do_not_make_the_search_long(monkeypatch, share, cheap_alone):
    """Their costs set the tolerance once, within which every set of the others was followed."""
    followed, keep = [], knapsack._undominated

    def count(removed, cost, which):
        followed.append(len(which))
        return keep(removed, cost, which)

    monkeypatch.setattr(knapsack, "_undominated", count)
    draw, problem = torch.Generator().manual_seed(0), []
    for i in range(60):
        removed = torch.arange(200) * (4096, 1536, 2048)[i % 3]
        bend, height = torch.rand(2, generator=draw, dtype=torch.float64)
        cost = height * (torch.arange(200, dtype=torch.float64) / 200) ** (1.5 + 2 * bend)
        problem.append(Group(removed, cost * (1e14 if i in (3, 25, 50) else 1)))
    remove = int(share * sum(int(group.removed.max()) for group in problem))
    choice = cheapest_options(problem, remove)
    assert max(followed) < 100_000
    if cheap_alone:  # the dear ones lose nothing, and the others what they would without them
        others = [i for i in range(60) if i not in (3, 25, 50)]
        assert [choice[i] for i in (3, 25, 50)] == [0, 0, 0]
        assert [choice[i] for i in others] == cheapest_options([problem[i] for i in others], remove)


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
