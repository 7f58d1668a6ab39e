"""Wrong types at every argument of every public function: one line of our own, and every documented type works."""

import inspect
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rankfold
from families import opened, tokens
from rankfold._utils.arguments import typed
from rankfold.errors import OptionError
from tiny_pairs import tokenizer

FUNCTIONS = sorted(name for name in rankfold.__all__ if inspect.isfunction(getattr(rankfold, name)))
# What a caller might mistake for something else: a path for an open model, a name or a class for a method, ...
VALUES = {
    "None": None,
    "text": "modegpt",
    "surrogate": "\udce9",
    "path": Path("nowhere"),
    "number": 3,
    "negative": -1,
    "share": 0.5,
    "nan": float("nan"),
    "yes": True,
    "bytes": b"text",
    "list": ["a.txt"],
    "numbers": [1, 2],
    "mapping": {"a.txt": "much"},
    "set": {"mlp"},
    "tensor": torch.zeros(2, 4),
    "ids": torch.ones(2, 4, dtype=torch.int64),
    "dtype": torch.float32,
    "class": rankfold.Rankfold,
    "object": object(),
    "function": len,
    "layer": torch.nn.Linear(2, 2),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Arguments that work, of every function that does not write."""
    place = tmp_path_factory.mktemp("arguments")
    source = opened("llama")
    source._tokenizer = tokenizer()
    (place / "a.txt").write_text("some text " * 100)
    source.model.save_pretrained(place / "model")
    tokenizer().save_pretrained(place / "model")
    windows, method, model = tokens(4), rankfold.Rankfold(sparsity=0.3, rank_multiple=1), place / "model"
    moments = rankfold.calibrate(source, windows)
    vision = (rankfold.open_model(model), method, windows)
    return {
        "calibrate": {"source": source, "tokens": windows, "output": None, "statistics": {"key"}},
        "compress": {"source": source, "method": method, "tokens": windows, "output": None, "moments": moments}
        | {"mode": "sequential", "on_plan": None},
        "compress_parts": {"parts": [vision, vision], "output": place / "parts", "mode": "sequential", "on_plan": None},
        "evaluate_text": {"model": model, "text": place / "a.txt", "max_length": 16, "limit": 1, "text_column": "text"}
        | {"dtype": "auto", "device": "cpu"},
        "export": {"model": model, "output": place / "out", "format": "stock", "dtype": "auto"},
        "load": {"model": model, "dtype": "auto", "device": "cpu"},
        "load_calibration": {
            "data": place / "a.txt",
            "model": source,
            "tokenizer": None,
            "num_samples": 1,
            "max_length": 16,
            "seed": 0,
            "text_column": "text",
        },
        "make_method": {"name": "modegpt", "sparsity": 0.3},
        "method_names": {},
        "open_model": {"model": model, "dtype": "auto", "device": "cpu", "tokenizer": None, "part": None},
        "perplexity": {"model": source.model, "windows": windows.ids, "autocast": None},
        "plan": {"source": source, "method": method, "tokens": windows, "moments": moments},
        "save": {"model": source.model, "folder": place / "saved", "tokenizer": None},
    }


def test_every_public_function_is_here(good):
    assert sorted(good) == FUNCTIONS
    for name, arguments in good.items():
        signature = inspect.signature(getattr(rankfold, name))
        named = {p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD}
        assert named - {"revision"} <= set(arguments), name


CASES = [(name, argument) for name in FUNCTIONS for argument in inspect.signature(getattr(rankfold, name)).parameters]


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_a_wrong_type_is_refused_in_one_line_of_our_own(name, argument, good, tmp_path, monkeypatch, subtests):
    """What is of the right type may work, or be refused for its value."""
    argument = "sparsity" if argument == "options" else argument
    for value in VALUES:
        place = tmp_path / value
        place.mkdir()
        monkeypatch.chdir(place)
        with subtests.test(value=value):
            try:
                getattr(rankfold, name)(**good[name] | {argument: VALUES[value]})
            except rankfold.RankfoldError as error:
                assert "\n" not in str(error) and "this is a bug" not in str(error)


@pytest.mark.parametrize("cls", [rankfold.Rankfold, rankfold.MoDeGPT, rankfold.LatentLLM])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_options_of_a_method_of_any_type_are_ours_to_refuse(cls, data):
    names = [name for name in inspect.signature(cls).parameters]
    given_ = data.draw(st.dictionaries(st.sampled_from(names), st.sampled_from(list(VALUES)), max_size=3))
    try:
        cls(**{name: VALUES[value] for name, value in given_.items()})
    except rankfold.RankfoldError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda good: rankfold.load_calibration("a.txt", "/path"), r"model must be an open model \(.*\), got '/path'"),
        (lambda good: rankfold.compress("org/name", rankfold.Rankfold()), "source must be an open model"),
        (lambda good: rankfold.compress(good["source"], rankfold.Rankfold), "method must be a method .* or a str, got"),
        (lambda good: rankfold.compress(good["source"], "modgpt", good["tokens"]), "did you mean 'modegpt'"),
        (lambda good: rankfold.compress(good["source"], "modegpt", good["tokens"].ids), "tokens must be calibration data"),
        (lambda good: rankfold.open_model(3), "model must be a str, a pathlib.Path or a PyTorch module, got '3' of type int"),
        (lambda good: rankfold.load("model", dtype=torch.float16), "dtype must be a str, got 'torch.float16'"),
        (lambda good: rankfold.calibrate(good["source"], good["tokens"], statistics={1}), "must be set of a str or None"),
        (lambda good: rankfold.compress_parts([(1, 2)], "x"), "each of the parts is an open model"),
        (lambda good: rankfold.compress_parts([3], "x"), "parts must be iterable of tuple of an open model"),
        (lambda good: rankfold.load_calibration([3], good["source"]), "the name of a text, .*; got list of int"),
    ],
)  # fmt: skip
def test_the_line_names_argument_kind_and_value(call, message, good):
    with pytest.raises(OptionError, match=message):
        call(good["compress"])


def test_a_method_may_be_named(good):
    given_ = good["compress"] | {"moments": None}
    by_name = rankfold.plan(given_["source"], "modegpt").to_dict()
    assert by_name == rankfold.plan(given_["source"], rankfold.MoDeGPT()).to_dict()
    result = rankfold.compress(given_["source"], "modegpt", given_["tokens"])
    assert result.config.quantization_config.fields["method"] == "modegpt"


def test_a_path_is_as_good_as_its_name(good):
    source, path = good["load_calibration"]["model"], good["load_calibration"]["data"]
    ways = [path, str(path), [path], {path: 2.0}]
    first, *others = [rankfold.load_calibration(way, source, num_samples=2, max_length=16) for way in ways]
    assert all(one.describe() == first.describe() and one.ids.equal(first.ids) for one in others)
    asked = {name: value for name, value in good["evaluate_text"].items() if name != "text"}
    one, other = (rankfold.evaluate_text(text=way, **asked) for way in (path, str(path)))
    assert one["nll"] == other["nll"]


def test_a_function_stays_itself():
    def one(a: int | None, *rest, b: "str" = "x", **more) -> str:
        """Join."""
        return f"{a}{rest}{b}{more}"

    checked = typed(one)
    assert checked.__doc__ == "Join." and inspect.signature(checked) == inspect.signature(one)
    assert checked(None, 2, b="y", c=3) == "None(2,)y{'c': 3}"
    with pytest.raises(OptionError, match="a must be a whole number or None, got 'True' of type bool"):
        checked(True)
    with pytest.raises(TypeError, match="missing"):
        checked()
