"""Wrong types at every argument of every public function: one line of our own, and every documented type works."""

import inspect
from pathlib import Path

import numpy as np
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
    source.processors._tokenizer = tokenizer()
    (place / "a.txt").write_text("some text " * 100)
    source.model.save_pretrained(place / "model")
    tokenizer().save_pretrained(place / "model")
    windows, method, model = tokens(4), rankfold.Rankfold(sparsity=0.3, rank_multiple=1), place / "model"
    vision = (rankfold.open_model(model), method, windows)
    opening = {
        "tokenizer": None,
        "component": None,
        "dtype": "auto",
        "device": "cpu",
        "revision": None,
        "offload": None,
    }
    drawing = {"num_samples": 1, "max_length": 16, "seed": 0, "text_column": "text"}
    measuring = {"calibration": place / "a.txt", **drawing, **opening}
    choosing = {"sparsity": 0.3, "target_size": None, "keep_quality": None, "method": "modegpt", "rank_multiple": 1}
    return {
        "calibrate": {"model": source.model, "output": None, "statistics": {"key"}}
        | {**measuring, "tokenizer": tokenizer()},
        "compress": {"model": model, "output": None, "mode": "sequential", "on_plan": None, "moments": None}
        | choosing
        | measuring,
        "compress_components": {"components": [vision, vision], "output": place / "parts", "mode": "sequential"}
        | {"on_plan": None},
        "evaluate_text": {"model": model, "text": place / "a.txt", "max_length": 16, "limit": 1, "text_column": "text"}
        | {"dtype": "auto", "device": "cpu"},
        "export": {"model": model, "output": place / "out", "format": "gguf", "dtype": "q4_0", "tokenizer": None}
        | {"calibration": place / "a.txt", **drawing},
        "load": {"model": model, "dtype": "auto", "device": "cpu"}
        | {"device_map": None, "max_memory": None, "offload_folder": None},
        "load_calibration": {
            "data": place / "a.txt",
            "model": source,
            "tokenizer": None,
            "shards": 1,
            **drawing,
        },
        "make_method": {"name": "modegpt", "sparsity": 0.3},
        "method_names": {},
        "open_model": {
            "model": model,
            "dtype": "auto",
            "device": "cpu",
            "tokenizer": None,
            "component": None,
            "offload": None,
        },
        "perplexity": {"model": source.model, "samples": windows.ids, "autocast": None, "dtype": "auto"}
        | {"device": "auto", "stream": False},
        "plan": {"model": model, "moments": None, "gpu": None, "gpus": 1} | choosing | measuring,
        "push": {"folder": place / "nowhere", "repo_id": "me/small", "private": False, "force": False},
        "recover": {"model": source.model, "teacher": model, "calibration": place / "a.txt", "output": None}
        | {"tune": "norms", "loss": "kl", "tokens": 64, "minutes": None, "rank": 1, "lr": None, "batch_tokens": 32}
        | {"max_length": 16, "tolerance": 0.02, "adapter": False, "blockwise": False, "cache_logits": None}
        | {"gradient_checkpointing": False, "text_column": "text"}
        | {"report_to": "none", "seed": 0, "device": "cpu"},
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
    option = "context" if argument == "options" else argument
    for value in VALUES:
        if argument == "on_plan" and callable(VALUES[value]):
            continue  # what the caller's own function raises is the caller's
        place = tmp_path / value
        place.mkdir()
        monkeypatch.chdir(place)
        with subtests.test(value=value):
            try:
                getattr(rankfold, name)(**good[name] | {option: VALUES[value]})
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


@pytest.fixture
def given(good):
    """Arguments of one compression of an open model."""
    return {"model": good["load_calibration"]["model"], "method": "modegpt", "calibration": tokens(4)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda given: rankfold.load_calibration("a.txt", "/path"), r"model must be an open model \(.*\), got '/path'"),
        (
            lambda given: rankfold.compress(3),
            "model must be a str, a pathlib.Path, a PyTorch module or an open model .*, got '3'",
        ),
        (lambda given: rankfold.compress("org/name", rankfold.Rankfold()), "sparsity must be a number or None, got"),
        (
            lambda given: rankfold.compress(**given | {"method": rankfold.Rankfold}),
            "method must be a method .* or a str, got",
        ),
        (lambda given: rankfold.compress(**given | {"method": "modgpt"}), "did you mean 'modegpt'"),
        (
            lambda given: rankfold.compress(**given, num_sample=3),
            "unknown argument, or option of modegpt, 'num_sample'; did you mean 'num_samples'.*available: sparsity, "
            "((?!sparsity).)*$",
        ),
        (lambda given: rankfold.compress(**given, ouput="small"), "'ouput'; did you mean 'output'"),
        (
            lambda given: rankfold.compress(**given, num_samples=3),
            "the calibration set is loaded already, so num_samples, max_length, seed, text_column have no effect",
        ),
        (
            lambda given: rankfold.compress(**given, moments="moments"),
            "give either calibration data or moments, not both",
        ),
        (
            lambda given: rankfold.compress(**given, device="cpu"),
            "the model is open already, and device is for opening it; give it to open_model",
        ),
        (
            lambda given: rankfold.compress(**given | {"method": rankfold.MoDeGPT(sparsity=0.2)}, sparsity=0.3),
            r"sparsity=0.3 with a method that has sparsity=0.2; give it to MoDeGPT\(...\) alone",
        ),
        (
            lambda given: rankfold.open_model(3),
            "model must be a str, a pathlib.Path or a PyTorch module, got '3' of type int",
        ),
        (lambda given: rankfold.open_model(given["model"].model, device="cuda"), "device"),
        (lambda given: rankfold.load("model", dtype=16), "dtype must be a str, got '16' of type int"),
        (lambda given: rankfold.calibrate(given["model"], tokens(4), statistics={1}), "must be set of a str or None"),
        (lambda given: rankfold.compress_components([(1, 2)], "x"), "each of the components is an open model"),
        (lambda given: rankfold.compress_components([3], "x"), "components must be iterable of tuple of an open model"),
        (
            lambda given: rankfold.load_calibration([3], given["model"]),
            "the name of a text, .*; got list of int",
        ),
        (
            lambda given: rankfold.perplexity(given["model"], tokens(4), dtype="float16"),
            "dtype and device are of a model that is loaded",
        ),
    ],
)
def test_the_line_names_argument_kind_and_value(call, message, given):
    with pytest.raises(OptionError, match=message):
        call(given)


@pytest.mark.parametrize("numbers", [{"sparsity": np.float32(0.25)}, {"sparsity": 0.25, "num_samples": np.int64(4)}])
def test_a_number_of_numpy_serves_as_one(numbers):
    seen = {}

    def function(sparsity: float, num_samples: int = 4) -> None:
        seen.update(sparsity=sparsity, num_samples=num_samples)

    typed(function)(**numbers)
    assert seen == {"sparsity": 0.25, "num_samples": 4} and {type(value) for value in seen.values()} == {float, int}


def test_a_dtype_or_a_device_of_pytorch_serves_as_its_name(given):
    named = rankfold.open_model(given["model"].model, dtype="bfloat16", device="cpu")
    meant = rankfold.open_model(given["model"].model, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (named.dtype, named.device) == (meant.dtype, meant.device) == (torch.bfloat16, torch.device("cpu"))
    with pytest.raises(OptionError, match="dtype must be auto, float32, bfloat16, float16; got 'float64'"):
        rankfold.open_model(given["model"].model, dtype=torch.float64)


def test_what_no_argument_is_called_is_refused_with_the_name_of_the_function():
    with pytest.raises(TypeError, match=r"^compress\(\): too many positional arguments$"):
        rankfold.compress("model", 0.3, "wikitext2")
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'max_lenght'; did you mean 'max_length'\?$"):
        rankfold.calibrate("model", max_lenght=3)
    with pytest.raises(TypeError, match=r"^open_model\(\): missing a required argument: 'model'$"):
        rankfold.open_model()
    with pytest.raises(TypeError, match=r"^load_calibration\(\): missing a required argument: 'model'$"):
        rankfold.load_calibration("text", samples=3)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_is_refused_by_the_name_it_is_called_by(function):
    with pytest.raises(TypeError, match=rf"^{function}\(\)"):
        getattr(rankfold, function)(*range(99))


def test_a_method_may_be_named_or_given(given):
    named, made = (rankfold.plan(**given | {"method": method}) for method in ("modegpt", rankfold.MoDeGPT()))
    assert named.to_dict() == made.to_dict()
    result = rankfold.compress(**given, sparsity=0.2, rank_multiple=2)
    assert result.model.config.quantization_config.fields["method"] == "modegpt"
    assert result.record["options"]["sparsity"] == 0.2 and result.record["options"]["rank_multiple"] == 2
    method = rankfold.MoDeGPT(sparsity=0.2, rank_multiple=2)
    same = rankfold.compress(**given | {"method": method}, sparsity=0.2).model.state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in result.model.state_dict().items())


def test_a_path_is_as_good_as_its_name(good):
    source, path = good["load_calibration"]["model"], good["load_calibration"]["data"]
    ways = [path, str(path), [path], {path: 2.0}]
    first, *others = [rankfold.load_calibration(way, source, num_samples=2, max_length=16) for way in ways]
    assert all(one.describe() == first.describe() and one.ids.equal(first.ids) for one in others)
    asked = {name: value for name, value in good["evaluate_text"].items() if name != "text"}
    one, other = (rankfold.evaluate_text(text=way, **asked) for way in (path, str(path)))
    assert one["nll"] == other["nll"]


def test_a_path_may_begin_at_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    call = typed(lambda output, folder="~/a", text="~/b": (output, folder, text))
    assert call("~/x") == (str(tmp_path / "x"), "~/a", "~/b")  # a default is the function's own
    assert call(Path("~/x"), folder="~no-user/x", text="~/c") == (tmp_path / "x", "~no-user/x", "~/c")
    assert call(None) == (None, "~/a", "~/b")


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
