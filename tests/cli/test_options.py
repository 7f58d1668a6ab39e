"""Groups of options that stand in a command's signature as one parameter each."""

import inspect

import pytest

from rankfold.cli import calibrate, compress, plan
from rankfold.cli.options import CalibrationOptions, MethodOptions, expanded
from rankfold.errors import OptionError
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
        for name, field in group.__dataclass_fields__.items():
            found = {repr(defaults(module.command)[name]) for module in commands}
            assert len(found) == 1 and repr(field.default) in found.pop()


def test_options_become_a_method():
    options = MethodOptions(sparsity=0.2, modules="mlp=0.4,vo=0.2", protect="0,-1", option=["ridge=0.5"])
    assert options.parse() == Rankfold(sparsity=0.2, modules={"mlp": 0.4, "vo": 0.2}, protect=(0, -1), ridge=0.5)
    assert MethodOptions(modules="mlp,qk").parse().modules == ("mlp", "qk")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protect": "first"}, "--protect takes block numbers such as 0,-1; got 'first'"),
        ({"modules": ","}, "--modules is empty; e.g. mlp,qk,vo"),
        ({"modules": "mlp=x"}, r"--modules takes mlp,qk,vo or mlp=0\.35"),
        ({"option": ["ridge"]}, "--option takes KEY=VALUE, got 'ridge'"),
        ({"option": ["ridge=much"]}, "--option 'ridge=much': expected a finite number"),
        ({"option": ["bias_refit=maybe"]}, "--option 'bias_refit=maybe': expected true or false"),
        ({"method": "modgpt"}, "did you mean 'modegpt'"),
    ],
)
def test_what_does_not_parse_says_what_is_allowed(options, message):
    with pytest.raises(OptionError, match=message):
        MethodOptions(**options).parse()
