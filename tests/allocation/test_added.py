"""The allocation of docs/add-an-allocation.md, as that page has it, on a whole model."""

import re
from pathlib import Path

import pytest

import rankfold
from families import opened, tokens
from rankfold.allocation import ALLOCATIONS
from rankfold.errors import OptionError

PAGE = Path(__file__).parents[2] / "docs/add-an-allocation.md"


@pytest.fixture
def added():
    """Return what the code of the page defines; the table is as before afterwards."""
    names = {"rankfold": rankfold, "__name__": "added"}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(code, names)
    yield names
    del ALLOCATIONS["rising"]


def lost(plan) -> list[float]:
    """Return the sparsity of every block."""
    blocks = {m.block: [x for x in plan.modules if x.block == m.block] for m in plan.modules}
    return [1 - sum(x.weights for x in some) / sum(x.dense_weights for x in some) for some in blocks.values()]


@pytest.mark.parametrize("name", ["modegpt", "latentllm", "flap"])
def test_it_is_taken_as_an_object_and_as_text(added, name):
    source, plans = opened("llama"), []
    moments = rankfold.calibrate(source, tokens())
    for given in (added["Rising"](slope=0.4), "rising:slope=0.4"):
        method = rankfold.make_method(name, sparsity=0.3, rank_multiple=2, allocation=given)
        plans.append(rankfold.plan(source, method=method, moments=moments))
    assert plans[0] == plans[1] and plans[0].method["allocation"] == "rising:slope=0.4"
    assert plans[0].facts.keys() == {"allocation", "energies"} and plans[0].sparsity >= 0.3
    first, *_, last = lost(plans[0])
    assert first < 0.3 < last


def test_a_slope_of_nothing_leaves_the_energies(added):
    source = opened("llama")
    moments = rankfold.calibrate(source, tokens())
    method = rankfold.make_method("modegpt", sparsity=0.3, rank_multiple=2, allocation="rising:slope=0")
    plan = rankfold.plan(source, method=method, moments=moments)
    energies, blocks = list(plan.facts["energies"].values()), lost(plan)
    assert blocks[energies.index(max(energies))] <= min(blocks) + 0.05


def test_its_options_are_checked(added):
    with pytest.raises(OptionError, match=r"slope of allocation rising must be in \[0, 1\], got 2.0"):
        rankfold.make_method("modegpt", allocation="rising:slope=2")
    with pytest.raises(OptionError, match="unknown option of allocation rising 'slop'; did you mean 'slope'"):
        rankfold.make_method("modegpt", allocation="rising:slop=2")
    with pytest.raises(OptionError, match="method shortgpt takes allocation least-influence, got rising"):
        rankfold.make_method("shortgpt", allocation="rising")
