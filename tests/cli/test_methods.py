"""`rankfold methods NAME`: what every option of a method is, as its class has it."""

import re
from dataclasses import fields

import pytest

from rankfold.cli.methods import options_of
from rankfold.cli.options import MethodOptions
from rankfold.errors import OptionError
from rankfold.methods import make_method, method_class, method_names


@pytest.mark.parametrize("name", method_names())
def test_every_option_is_listed_with_one_line_and_its_default_is_what_leaving_it_out_means(name):
    rows = {re.sub("^--(set )?|=$", "", row["option"]).replace("-", "_"): row for row in options_of(name)}
    assert {*rows} == {field.name for field in fields(method_class(name))}
    assert all(row["what it is"] and not re.search(r"\n|``|:\w+:", row["what it is"]) for row in rows.values())
    own = [row["option"].removeprefix("--set ") + row["default"] for row in rows.values() if "--set" in row["option"]]
    flags = {key: rows[key]["default"] for key in ("allocation", "budget", "scope", "target")}
    flags |= {"sparsity": float(rows["sparsity"]["default"])}
    assert MethodOptions(method=name, settings=own, **flags).parse() == make_method(name)
    assert MethodOptions(method=name).parse() == make_method(name)


def test_types_say_what_is_allowed():
    rows = {row["option"]: row for row in options_of("modegpt")}
    assert rows["--set ridge="] == {
        "option": "--set ridge=",
        "type": "float",
        "default": "0.0001",
        "what it is": "damping lambda of the MLP's moment, in the unit that ridge_scale names",
    }
    assert rows["--set gqa="]["type"] == "joint | paper" and "(App. B.1)" in rows["--set gqa="]["what it is"]
    assert rows["--exclude-blocks"]["type"] == "tuple[int, ...]"
    assert [*rows].index("--set head_dim=") < [*rows].index("--sparsity")


def test_another_name_is_refused():
    with pytest.raises(OptionError, match="did you mean 'modegpt'"):
        options_of("modgpt")
