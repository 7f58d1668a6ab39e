"""Methods with options as one argument of `rankfold compare`."""

import pytest

from rankfold.allocation import OWL
from rankfold.cli.forms import parse_forms, parse_sparsities
from rankfold.comparison import Form, cells_of
from rankfold.errors import OptionError
from rankfold.methods import NarrowingMethod, method_class, method_names


def test_names_and_options_come_apart_at_commas():
    text = (
        "rankfold,modegpt:selection=leverage,selection_qk=norm,gqa=paper,"
        "latentllm:joint=qk+vo,rounds=2,svd:mode=sequential"
    )
    assert parse_forms(text) == [
        Form("rankfold"),
        Form("modegpt", {"selection": "leverage", "selection_qk": "norm", "gqa": "paper"}),
        Form("latentllm", {"joint": "qk,vo", "rounds": 2}),
        Form("svd", {}, "sequential"),
    ]


def test_options_of_every_method_are_taken_with_their_types():
    (form,) = parse_forms(
        "modegpt:modules=mlp+qk,exclude_blocks=0+-1,allocation=owl:threshold=3+spread=0.1,"
        "rank_multiple=2,bias_refit=false,ridge=1e-3"
    )
    assert form.options == {
        "modules": ("mlp", "qk"),
        "exclude_blocks": (0, -1),
        "allocation": "owl:threshold=3,spread=0.1",
        "rank_multiple": 2,
        "bias_refit": False,
        "ridge": 1e-3,
    }
    assert form.at(0.3).method.exclude_blocks == (0, -1)
    assert form.at(0.3).method.allocation == OWL(threshold=3.0, spread=0.1) and parse_forms(form.label) == [form]


def test_modules_may_have_the_sparsity_of_their_row():
    """Next to experts 2:4 methods are given in no other way."""
    (form,) = parse_forms("wanda:modules=qkv=0.5+o=0.5")
    method = form.at(0.5).method
    assert method.own_sparsities == {"qkv": 0.5, "o": 0.5} and parse_forms(form.label) == [form]


@pytest.mark.parametrize("name", method_names())
def test_every_method_is_taken_by_name_and_a_label_is_what_the_command_line_takes(name):
    (form,) = parse_forms(name)
    assert form.label == name and form.at(0.2).method.sparsity == 0.2
    cls = method_class(name)
    options = ({"rank_multiple": 4} if issubclass(cls, NarrowingMethod) else {}) | (
        {"exclude_blocks": (0, 1)} if cls.can_exclude_blocks else {}
    )
    (again,) = parse_forms(Form(name, options, form.at(0.2).mode).label)
    assert again.at(0.2).key == Form(name, options).at(0.2).key


def test_moments_are_shared_unless_the_method_or_its_options_need_text():
    modes = {text: parse_forms(text)[0].at(0.3).mode for text in ("modegpt", "rankfold", "modegpt:allocation=measured")}
    assert modes == {"modegpt": "one-pass", "rankfold": "sequential", "modegpt:allocation=measured": "sequential"}


def test_a_method_is_compared_in_the_mode_of_its_paper():
    """Wanda and SparseGPT measure a block on the masked ones before it; on the dense model they lose more."""
    modes = {name: parse_forms(name)[0].at(0.5).mode for name in ("sparsegpt", "wanda", "pruner-zero", "flap", "svd")}
    assert {name for name, mode in modes.items() if mode == "sequential"} == {"sparsegpt", "wanda"}
    assert parse_forms("wanda:mode=one-pass")[0].at(0.5).mode == "one-pass"


@pytest.mark.parametrize(
    "text, message",
    [
        ("modgpt", "unknown method 'modgpt'; did you mean 'modegpt'"),
        ("modegpt:selec=leverage", "unknown modegpt option 'selec'; did you mean 'selection'"),
        ("modegpt:selection=leverag", "unknown selection 'leverag'; did you mean 'leverage'"),
        ("modegpt:ridge=nan", "--methods 'ridge=nan': expected a finite number"),
        ("modegpt:ridge=1,ridge=2", "gives 'ridge' of modegpt more than once"),
        ("modegpt:sparsity=0.3", "given by --sparsities"),
        ("modegpt:ridge", "is KEY=VALUE, got 'ridge'"),
        ("rankfold:mode=one-pass", "unknown mode of rankfold 'one-pass'"),
        ("modegpt,,svd", "--methods takes names such as"),
        ("", "--methods takes names such as"),
        ("ridge=1", "unknown method 'ridge=1'"),
        ("modegpt,modegpt:selection=obs", "is the same as modegpt at 0.3; give it once"),
        ("modegpt:modules=mlp=0.2", "gives its modules other sparsities than the 0.3 of its row"),
        ("modegpt:modules=mlp+mlp", "--modules names 'mlp' more than once"),
    ],
)
def test_what_is_no_method_is_said_in_one_line(text, message):
    with pytest.raises(OptionError) as error:
        cells_of(parse_forms(text), [0.3])
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "x", "0", "1", "0.3,1.5", "nan", "inf", "0.3,", "-0.1"])
def test_sparsities_out_of_range(text):
    with pytest.raises(OptionError, match=r"numbers in \(0, 1\)"):
        parse_sparsities(text)


def test_a_sparsity_twice_is_refused():
    assert parse_sparsities("0.1,0.30") == [0.1, 0.3]
    with pytest.raises(OptionError, match="give it once"):
        cells_of(parse_forms("svd"), [0.3, 0.3])
