"""Options out of range are refused when the method is made, not after minutes of work."""

import pytest

from rankfold import make_method
from rankfold.errors import OptionError


@pytest.mark.parametrize("method", ["modegpt", "latentllm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("option", ["sparsity", "epsilon", "ridge"])
def test_numbers_must_be_finite(method, option, value):
    with pytest.raises(OptionError, match=rf"{option} must be a finite number, got {value}"):
        make_method(method, **{option: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ridge": 0.0}, r"ridge must be > 0, got 0.0; the default is 1e-4"),
        ({"ridge": -1.0}, r"ridge must be > 0, got -1.0"),
        ({"sparsity": 1.0}, r"sparsity must be in \[0, 1\), got 1.0"),
        ({"modules": {"mlp": float("nan")}}, r"mlp must be in \[0, 1\), got nan"),
        (
            {"select": "eliminate"},
            r"unknown select 'eliminate'; did you mean 'elimination'\? available: elimination, leverage",
        ),
        ({"select_qk": "norms"}, r"unknown select_qk 'norms'; did you mean 'norm'\? available: elimination, norm"),
        ({"gqa": "papers"}, r"unknown gqa 'papers'; did you mean 'paper'"),
    ],
)
def test_options_of_modegpt_say_what_is_allowed(options, message):
    with pytest.raises(OptionError, match=message):
        make_method("modegpt", **options)
