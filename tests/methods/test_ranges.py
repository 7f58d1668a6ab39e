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
        ({"modules": {"mlp": float("nan")}}, "mlp must be a finite number, got nan"),
        (
            {"select": "eliminate"},
            r"unknown select 'eliminate'; did you mean 'elimination'\? available: elimination, leverage",
        ),
        ({"select_qk": "norms"}, r"unknown select_qk 'norms'; did you mean 'norm'\? available: elimination, norm"),
        (
            {"sensitivity": "gradients"},
            r"unknown sensitivity 'gradients'; did you mean 'gradient'\? available: none, gradient",
        ),
        (
            {"sensitivity": "gradient", "select": "leverage"},
            "select=leverage does not look at outputs, so sensitivity=gradient has nothing to weigh; drop one",
        ),
        ({"sensitivity": "gradient", "gqa": "paper"}, "gqa=paper does not look at outputs"),
        ({"gqa": "papers"}, r"unknown gqa 'papers'; did you mean 'paper'"),
    ],
)
def test_options_of_modegpt_say_what_is_allowed(options, message):
    with pytest.raises(OptionError, match=message):
        make_method("modegpt", **options)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("modegpt", {"sparsity": "0.3"}, "sparsity must be a number, got '0.3'"),
        ("modegpt", {"sparsity": True}, "sparsity must be a number, got True"),
        ("modegpt", {"epsilon": "x"}, "epsilon must be a number, got 'x'"),
        ("modegpt", {"multiple": 8.0}, "multiple must be a whole number, got 8.0"),
        ("modegpt", {"modules": 3}, "modules must be names of modules, or a mapping to their sparsities, got 3"),
        ("modegpt", {"modules": ()}, "modules is empty"),
        ("modegpt", {"modules": {}}, "modules is empty"),
        ("modegpt", {"modules": {"mlp": "0.3"}}, "mlp must be a number, got '0.3'"),
        ("modegpt", {"protect": 5}, "protect must be a tuple of block numbers, got 5"),
        ("modegpt", {"protect": ("x",)}, r"protect takes block numbers such as \(0, -1\), got \('x',\)"),
        ("modegpt", {"protect": (0.5,)}, r"protect takes block numbers such as \(0, -1\), got \(0.5,\)"),
        ("modegpt", {"bias_refit": "false"}, "bias_refit must be true or false, got 'false'"),
        ("modegpt", {"bias_refit": 2}, "bias_refit must be true or false, got 2"),
        ("latentllm", {"alpha": -1.0}, "alpha must be > 0, got -1.0"),
        ("latentllm", {"condition_limit": 0.5}, "condition_limit must be >= 1, got 0.5"),
        ("latentllm", {"window": 0.5}, "window must be a whole number, got 0.5"),
        ("latentllm", {"bits": None}, "bits must be a whole number, got None"),
        ("latentllm", {"joint": 5}, "joint must be text, got 5"),
    ],
)
def test_options_of_another_kind_are_refused(method, options, message):
    with pytest.raises(OptionError, match=message):
        make_method(method, **options)


def test_an_outlier_is_more_than_nothing_and_one_token_is_a_context():
    with pytest.raises(OptionError, match="outlier must be > 0, got 0.0; OWL takes 3 to 10"):
        make_method("modegpt", outlier=0.0)
    with pytest.raises(OptionError, match="context must be >= 1, got 0"):
        make_method("modegpt", context=0, budget="flops")
    assert make_method("modegpt", context=1, budget="flops").context == 1
