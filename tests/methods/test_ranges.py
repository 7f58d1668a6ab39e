"""Options out of range are refused when the method is made, not after minutes of work."""

import pytest

from rankfold import make_method
from rankfold.errors import OptionError


@pytest.mark.parametrize("method", ["modegpt", "latentllm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("option", ["sparsity", "ridge"])
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
            {"selection": "leverages"},
            r"unknown selection 'leverages'; did you mean 'leverage'\? available: obs, leverage",
        ),
        ({"selection_qk": "norms"}, r"unknown selection_qk 'norms'; did you mean 'norm'\? available: obs, norm"),
        (
            {"output_weighting": "fishers"},
            r"unknown output_weighting 'fishers'; did you mean 'fisher'\? available: none, fisher",
        ),
        (
            {"output_weighting": "fisher", "selection": "leverage"},
            "selection=leverage does not look at outputs, so output_weighting=fisher has nothing to weigh; drop one",
        ),
        ({"output_weighting": "fisher", "gqa": "paper"}, "gqa=paper does not look at outputs"),
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
        ("modegpt", {"rank_multiple": 8.0}, "rank_multiple must be a whole number, got 8.0"),
        ("modegpt", {"modules": 3}, "modules must be names of modules, or a mapping to their sparsities, got 3"),
        ("modegpt", {"modules": ()}, "modules is empty"),
        ("modegpt", {"modules": {}}, "modules is empty"),
        ("modegpt", {"modules": {"mlp": "0.3"}}, "mlp must be a number, got '0.3'"),
        ("modegpt", {"exclude_blocks": 5}, "exclude_blocks must be a tuple of block numbers, got 5"),
        ("modegpt", {"exclude_blocks": ("x",)}, r"exclude_blocks takes block numbers such as \(0, -1\), got \('x',\)"),
        ("modegpt", {"exclude_blocks": (0.5,)}, r"exclude_blocks takes block numbers such as \(0, -1\), got \(0.5,\)"),
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
    with pytest.raises(OptionError, match="threshold of allocation owl must be > 0, got 0.0; the paper takes 3 to 10"):
        make_method("modegpt", allocation="owl:threshold=0")
    with pytest.raises(
        OptionError, match="context of budget flops must be >= 1, got 0; it is the tokens of one sequence"
    ):
        make_method("modegpt", budget="flops:context=0")
    assert make_method("modegpt", budget="flops:context=1").budget.context == 1
