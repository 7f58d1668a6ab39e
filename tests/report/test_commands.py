"""The command that makes a checkpoint again is one that the command line takes."""

import json
import shlex
from dataclasses import fields

import pytest
import typer

from rankfold.allocation import OWL, Bytes, Influence
from rankfold.cli.app import app
from rankfold.cli.options import MethodOptions
from rankfold.methods import make_method
from rankfold.report.commands import reproduce_command

CALIBRATION = {"source": "a text.txt", "samples": 4, "length": 32, "seed": 1}
SETTINGS = [
    ("rankfold", {}, "--sparsity 0.3"),
    ("modegpt", {"modules": {"mlp": 0.2}, "sparsity": 0.5}, "--modules mlp=0.2"),
    ("modegpt", {"budget": "flops:context=64"}, "--budget flops:context=64"),
    ("modegpt", {"budget": Bytes(context=64, batch=8)}, "--budget bytes:context=64,batch=8"),
    ("modegpt", {"allocation": Influence(temperature=0.5)}, "--allocation influence:temperature=0.5"),
    ("modegpt", {"exclude_blocks": (0, -1), "scope": "model"}, "--scope model --exclude-blocks 0,-1"),
    ("sleb", {}, "--method sleb --sparsity 0.3 --calibration"),
    ("modegpt", {"allocation": OWL(threshold=3, spread=0.1)}, "--allocation owl:threshold=3.0,spread=0.1"),
    (
        "rankfold",
        {"target": "stock", "allocation": "uniform", "exclude_blocks": (), "head_dim": 8},
        "--option head_dim=8",
    ),
]


@pytest.mark.parametrize(("name", "options", "said"), SETTINGS)
def test_what_is_given_is_taken_and_says_the_same(name, options, said):
    method = make_method(name, **options)
    plan = json.loads(json.dumps({"method": method.describe(), "part": None}))
    record = {"base_model": "my model", "plan": plan, "calibration": CALIBRATION, "mode": "sequential", "dtype": "auto"}
    line = reproduce_command(record, "small")
    assert said in line and line.endswith("--length 32 --seed 1 --mode sequential --dtype auto")
    given = typer.main.get_command(app).commands["compress"].make_context("compress", shlex.split(line)[2:]).params
    again = MethodOptions(**{field.name: given[field.name] for field in fields(MethodOptions)}).parse()
    assert reproduce_command(record | {"plan": {"method": again.describe(), "part": None}}, "small") == line


def test_the_column_of_the_text_is_said():
    plan = {"method": make_method("modegpt").describe(), "part": None}
    record = {"base_model": "m", "plan": plan, "calibration": CALIBRATION | {"field": "a body"}, "mode": "one-pass"}
    assert "--seed 1 --field 'a body' --mode one-pass" in reproduce_command(record | {"dtype": "auto"}, "small")
