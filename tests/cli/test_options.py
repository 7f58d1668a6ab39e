"""Groups of options that stand in a command's signature as one parameter each."""

import inspect
from dataclasses import fields
from types import SimpleNamespace

import pytest

from rankfold.cli import calibrate, compress, plan
from rankfold.cli.calibration import CalibrationOptions
from rankfold.cli.options import MethodOptions, expanded
from rankfold.errors import METHOD_FLAGS, OptionError
from rankfold.methods import Rankfold


@expanded
def command(model: str, what: MethodOptions, text: CalibrationOptions, json: bool = False):
    return model, what, text, json


def defaults(function) -> dict:
    return {p.name: (p.annotation, p.default) for p in inspect.signature(function).parameters.values()}


def test_values_go_to_their_group():
    given = {name: default for name, (_, default) in defaults(command).items()}
    model, what, text, json = command(**given | {"model": "m", "sparsity": 0.2, "seed": 7, "json": True})
    assert (model, json) == ("m", True)
    assert what == MethodOptions(sparsity=0.2) and text == CalibrationOptions(seed=7)


def test_commands_share_every_option_of_a_group():
    for group, commands in (
        (MethodOptions, (compress, plan)),
        (CalibrationOptions, (compress, plan, calibrate)),
    ):
        for field in fields(group):
            found = {repr(defaults(module.command)[field.name]) for module in commands}
            assert len(found) == 1 and repr(getattr(group(), field.name)) in found.pop()


def test_options_become_a_method():
    options = MethodOptions(sparsity=0.2, modules="mlp=0.4,vo=0.2", exclude_blocks="0,-1", settings=["ridge=0.5"])
    assert options.parse() == Rankfold(sparsity=0.2, modules={"mlp": 0.4, "vo": 0.2}, exclude_blocks=(0, -1), ridge=0.5)
    assert MethodOptions(modules="mlp,qk").parse().modules == ("mlp", "qk")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude_blocks": "first"}, "--exclude-blocks takes block numbers such as 0,-1; got 'first'"),
        ({"modules": ","}, "--modules is empty; e.g. mlp,qk,vo"),
        ({"modules": "mlp=x"}, r"--modules takes mlp,qk,vo or mlp=0\.35"),
        ({"settings": ["ridge"]}, "--set takes KEY=VALUE, got 'ridge'"),
        ({"settings": ["ridge=much"]}, "--set 'ridge=much': expected a finite number"),
        ({"settings": ["bias_refit=maybe"]}, "--set 'bias_refit=maybe': expected true or false"),
        ({"method": "modgpt"}, "did you mean 'modegpt'"),
    ],
)
def test_what_does_not_parse_says_what_is_allowed(options, message):
    with pytest.raises(OptionError, match=message):
        MethodOptions(**options).parse()


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        (["a.txt", "self"], {"a.txt": 1, "self": 1}),
        (["a.txt=0.7", "wikitext2=.3"], {"a.txt": 0.7, "wikitext2": 0.3}),
        (["wikitext2:a=1=2", "b=1"], {"wikitext2:a=1": 2.0, "b": 1.0}),
        (["b=1=3", "wikitext2:b=1=1"], {"b=1": 3.0, "wikitext2:b=1": 1.0}),  # b=1 is a file
        (["b=1", "wikitext2:b=1"], {"b=1": 1, "wikitext2:b=1": 1}),
    ],
)
def test_a_text_may_have_a_share_and_a_file_of_that_name_comes_first(given, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if given[0] != "wikitext2:a=1=2":
        (tmp_path / "b=1").write_text("text")
    asked = {}
    monkeypatch.setattr("rankfold.data.load.load_calibration", lambda names, model, **_: asked.update(names=names))
    reads_text = SimpleNamespace(part=SimpleNamespace(takes_images=False))
    CalibrationOptions(calibration=given).load(reads_text)
    assert asked["names"] == texts


@pytest.mark.parametrize(
    ("given", "language", "vision"),
    [
        (["pairs.jsonl"], (["pairs.jsonl"], "body"), (["pairs.jsonl"], "text")),
        (["vision=a/", "language=b=1"], (["b=1"], "body"), (["a/"], "text")),
        (["language=a.txt=0.7", "language=b.txt=.3", "vision=p.parquet"],
         (["a.txt=0.7", "b.txt=.3"], "body"), (["p.parquet"], "text")),
    ],
)  # fmt: skip
def test_a_calibration_is_of_both_components_or_of_each(given, language, vision):
    """And a column is one of the text."""
    found = CalibrationOptions(calibration=given, text_column="body", seed=3).of_components(["vision", "language"])
    assert {name: ([*one.calibration], one.text_column, one.seed) for name, one in found.items()} == {
        "language": (*language, 3),
        "vision": (*vision, 3),
    }


def test_options_of_a_method_that_errors_name_by_a_flag_have_one():
    assert {field.name for field in fields(MethodOptions)} - {"method", "settings"} == METHOD_FLAGS
