"""Records of earlier versions: the options of a method by their old names."""

import json
from pathlib import Path

import pytest

from rankfold import make_method
from rankfold.methods.upgrade import upgraded

RESULTS = Path(__file__).parents[2] / "benchmarks/results/kv_cache_smollm2.json"
OLD = {
    "sparsity": 0.4,
    "of": "model",
    "modules": ["mlp"],
    "multiple": 4,
    "protect": [0],
    "target": "transformers",
    "select": "elimination",
    "select_qk": "norm",
    "sensitivity": "gradient",
    "bias_refit": False,
    **{"allocation": "uniform", "epsilon": 0.5, "outlier": 4.0, "spread": 0.1},
    **{"budget": "parameters", "context": 64, "batch": 3},
}


def read(options: dict):
    found = {key: tuple(value) if isinstance(value, list) else value for key, value in upgraded(options).items()}
    return make_method(found.pop("method", "rankfold"), **found)


def test_old_names_become_those_of_today():
    expected = {
        **{"scope": "model", "modules": ("mlp",), "rank_multiple": 4, "exclude_blocks": (0,), "bias_refit": False},
        **{"selection": "obs", "selection_qk": "norm", "output_weighting": "fisher", "allocation": "uniform"},
    }
    assert read(OLD) == make_method("rankfold", sparsity=0.4, **expected)
    more = read({"feedback": False, "removal": True})
    assert not more.residual_correction and more.allow_module_removal


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"allocation": "owl"}, "owl:threshold=4.0,spread=0.1"),
        ({"allocation": "influence"}, "influence:temperature=0.5"),
        ({"allocation": "influence-modules", "epsilon": None}, "influence-modules"),
        ({"allocation": "spectrum"}, "spectrum"),
        ({"budget": "flops"}, "flops:context=64"),
        ({"budget": "latency", "of": "blocks"}, "latency:context=64"),
        ({"budget": "bytes"}, "bytes:context=64,batch=3"),
    ],
)
def test_what_stood_beside_an_allocation_or_a_budget_is_in_it(old, new):
    method = read(OLD | {"method": "modegpt"} | old)
    assert new in (str(method.allocation), str(method.budget))


def test_options_of_today_stay_as_they_are():
    for options in ({"allocation": "owl:threshold=3.0,spread=0.2"}, {"budget": "bytes:context=16,batch=2"}, {}):
        described = make_method("modegpt", selection="leverage", exclude_blocks=(1,), **options).describe()
        assert upgraded(described) == described


def test_a_record_of_an_earlier_version_is_read():
    """Of every row of a table made by an earlier version, the method with its options."""
    rows = [row["method"] for row in _with_methods(json.loads(RESULTS.read_text(encoding="utf-8")))]
    assert len(rows) > 3 and any("multiple" in row or "rank_multiple" in row for row in rows)
    for row in rows:
        method = read(row)
        assert method.name == row["method"] and method.sparsity == row["sparsity"]


def _with_methods(value):
    """All parts of a file that describe a method."""
    if isinstance(value, dict) and isinstance(value.get("method"), dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _with_methods(part)
