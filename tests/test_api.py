"""The call: any model and any calibration set go in, one kind of result comes out, and nothing given is changed."""

import copy
import dataclasses
import inspect
import json

import datasets
import pytest
import torch
import transformers as t

import rankfold
from families import some_ids
from rankfold.errors import CheckpointError, OptionError, UnsupportedModelError
from rankfold.report.record import read_record
from saved import save_text, save_tiny
from tiny_pairs import tokenizer

HOW = {"sparsity": 0.3, "method": "modegpt", "rank_multiple": 2}
IDS = some_ids(8, 32, seed=1)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("call")
    save_tiny(place / "model", blocks=2)
    save_text(place / "text.txt")
    return place


@pytest.fixture(scope="module")
def in_memory(place):
    return t.AutoModelForCausalLM.from_pretrained(place / "model")


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_every_kind_of_model_gives_the_same_result(place, in_memory, tmp_path):
    folder = place / "model"
    results = [
        rankfold.compress(model, calibration=IDS, **HOW)
        for model in (str(folder), folder, in_memory, rankfold.open_model(folder))
    ]
    results.append(rankfold.compress(folder, calibration=IDS, output=tmp_path / "out", **HOW))
    first, *others = results
    assert first.model.num_parameters() == first.plan.parameters_after < in_memory.num_parameters()
    assert all(same(first.model, other.model) and other.plan.modules == first.plan.modules for other in others)
    assert [result.output for result in results] == [None] * 4 + [tmp_path / "out"]
    assert results[-1].record == read_record(tmp_path / "out")
    assert first.record.keys() == results[-1].record.keys()
    assert first.record["held_out"] == results[-1].record["held_out"]


@pytest.mark.parametrize("kind", ["model in memory", "folder", "id tensor", "list of texts", "dataset"])
def test_the_first_guesses_of_a_user_work(kind, place, in_memory):
    rows = [(place / "text.txt").read_text()[begin : begin + 800] for begin in range(0, 16000, 800)]
    words = t.AutoTokenizer.from_pretrained(place / "model")
    model, calibration, more = {
        "model in memory": (in_memory, str(place / "text.txt"), {"tokenizer": words}),
        "folder": (str(place / "model"), str(place / "text.txt"), {}),
        "id tensor": (in_memory, IDS, {}),
        "list of texts": (in_memory, rows, {"tokenizer": words}),
        "dataset": (place / "model", datasets.Dataset.from_dict({"body": rows}), {"text_column": "body"}),
    }[kind]
    drawn = {} if kind == "id tensor" else {"num_samples": 8, "max_length": 32}
    result = rankfold.compress(model, sparsity=0.3, calibration=calibration, rank_multiple=2, **more, **drawn)
    assert isinstance(result, rankfold.CompressionResult) and result.output is None
    assert result.model.num_parameters() == result.plan.parameters_after < result.plan.parameters
    assert result.record["method"] == "rankfold" and result.record["calibration"]["tokens"] > 0
    assert torch.isfinite(result.model(some_ids()).logits).all()


def test_the_model_that_is_given_is_not_changed(in_memory):
    model = copy.deepcopy(in_memory).train()
    model.model.layers[0].eval()
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    modes = [module.training for module in model.modules()]
    grads = [parameter.requires_grad for parameter in model.parameters()]
    result = rankfold.compress(model, calibration=IDS, **HOW)
    assert result.model is not model and not result.model.training
    for parameter in result.model.parameters():  # and shares no memory with the result
        parameter.data.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.config.to_dict() == config and not hasattr(model.config, "quantization_config")
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == grads


def test_a_model_in_memory_is_written_in_the_dtype_asked_for(in_memory, tmp_path):
    result = rankfold.compress(in_memory, calibration=IDS, dtype="bfloat16", output=tmp_path / "out", **HOW)
    assert result.model.dtype is torch.bfloat16 and in_memory.dtype is torch.float32
    assert result.record["dtype"] == "bfloat16"
    held = rankfold.compress(in_memory, calibration=IDS, dtype="bfloat16", **HOW)
    assert same(held.model, result.model)


def test_a_result_describes_itself_and_can_be_saved(place, tmp_path):
    held = rankfold.compress(place / "model", calibration=str(place / "text.txt"), num_samples=4, max_length=32, **HOW)
    facts = held.record["held_out"]
    assert repr(held) == (
        f"CompressionResult(modegpt, sparsity {held.plan.sparsity:.2f}; {held.plan.parameters:,} -> "
        f"{held.plan.parameters_after:,} parameters; held-out perplexity {facts['perplexity_dense']:.2f} -> "
        f"{facts['perplexity']:.2f}; in memory)"
    )
    folder = held.save_pretrained(tmp_path / "saved")
    assert same(t.AutoModelForCausalLM.from_pretrained(folder), held.model)
    assert t.AutoTokenizer.from_pretrained(folder)("some text") == t.AutoTokenizer.from_pretrained(place / "model")(
        "some text"
    )
    with pytest.raises(CheckpointError, match="saved exists already"):
        held.save_pretrained(tmp_path / "saved")
    written = rankfold.compress(place / "model", calibration=IDS, output=tmp_path / "out", **HOW)
    assert repr(written).endswith(f"in {str(tmp_path / 'out')!r})")
    assert written.model is written.model, "it is loaded once"


def test_a_finished_run_that_lacked_its_name_gives_the_same_plan(place, tmp_path, monkeypatch):
    from rankfold.checkpoint.run import RunFolder

    def stop(self):
        raise KeyboardInterrupt

    plans = []
    given = {"calibration": IDS, "output": tmp_path / "out", "on_plan": plans.append, **HOW}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, "publish", stop)
        rankfold.compress(place / "model", **given)
    result = rankfold.compress(place / "model", **given)
    assert len(plans) == 1, "nothing was planned again"
    assert json.loads(json.dumps(dataclasses.asdict(result.plan))) == json.loads(
        json.dumps(dataclasses.asdict(plans[0]))
    )


def test_a_local_model_in_memory_is_named_by_its_folder(place, monkeypatch):
    monkeypatch.chdir(place.parent)
    for name in (str(place / "model"), f"{place.name}/model"):  # the latter could be a hub id
        model = t.AutoModelForCausalLM.from_pretrained(name)
        assert rankfold.compress(model, calibration=IDS, **HOW).record["base_model"] == "model"


def test_moments_take_the_place_of_calibration(place, tmp_path):
    moments = rankfold.calibrate(place / "model", IDS, tmp_path / "moments")
    ways = [{"moments": moments}, {"moments": tmp_path / "moments"}, {"calibration": moments}]
    first, *others = [rankfold.compress(place / "model", **HOW, **way).model for way in ways]
    assert all(same(first, other) for other in others)
    assert same(first, rankfold.compress(place / "model", calibration=IDS, mode="one-pass", **HOW).model)
    planned = rankfold.plan(place / "model", moments=tmp_path / "moments", **HOW)
    assert all(module.relative_error is not None for module in planned.modules)
    assert rankfold.plan(place / "model", calibration=moments, **HOW).modules == planned.modules
    with pytest.raises(OptionError, match="give either calibration data or moments, not both"):
        rankfold.compress(place / "model", calibration=IDS, moments=moments, **HOW)


def test_the_default_calibration_is_a_mixture_where_text_is_needed(place, monkeypatch):
    asked = []

    def load(data, model, **options):
        asked.append((data, options))
        raise KeyboardInterrupt

    monkeypatch.setattr("rankfold.api.load_calibration", load)
    for call in (rankfold.compress, rankfold.calibrate, rankfold.plan):
        with pytest.raises(KeyboardInterrupt):
            call(place / "model", num_samples=7, max_length=64, seed=3)
    assert (
        asked
        == [("mixture", {"tokenizer": None, "num_samples": 7, "max_length": 64, "seed": 3, "text_column": "text"})] * 3
    )
    rankfold.plan(place / "model", method="modegpt")
    assert len(asked) == 3, "shapes are enough for uniform ranks"


def test_perplexity_takes_whatever_holds_a_model(place, in_memory):
    result = rankfold.compress(place / "model", calibration=IDS, **HOW)
    dense = [rankfold.perplexity(m, IDS)["nll"] for m in (place / "model", in_memory, rankfold.open_model(in_memory))]
    assert dense[0] == dense[1] == dense[2]
    assert rankfold.perplexity(result, IDS)["nll"] == rankfold.perplexity(result.model, IDS)["nll"] != dense[0]


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "device": lambda: torch.device("meta"),
}


def test_modes_that_the_caller_is_in_change_no_number_and_forbid_no_training(in_memory, subtests):
    how = {"calibration": IDS, **HOW}
    expected = rankfold.compress(in_memory, **how).model
    training = {"calibration": IDS, "tokens": 32, "batch_tokens": 16, "max_length": 16, "lr": 1e-3}
    for name, mode in MODES.items():
        with subtests.test(name):
            with mode():
                result = rankfold.compress(in_memory, **how)
                rankfold.recover(result, in_memory, **training)
            assert same(result.model, expected)
            result.model(IDS, labels=IDS).loss.backward()


def test_a_default_dtype_that_sums_would_have_is_refused(in_memory):
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(OptionError, match="the default dtype of PyTorch is torch.bfloat16; set it to torch.float3"):
            rankfold.compress(in_memory, calibration=IDS, **HOW)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_model_with_adapters_is_refused_where_these_alone_would_be_written(place, in_memory, tmp_path):
    small = rankfold.compress(in_memory, calibration=IDS, **HOW).model
    small.peft_config = {}  # as add_adapter and load_adapter of transformers leave it
    for call in (
        lambda: rankfold.save(small, tmp_path / "saved"),
        lambda: rankfold.export(small, tmp_path / "exported"),
        lambda: rankfold.recover(small, in_memory, calibration=IDS),
    ):
        with pytest.raises(UnsupportedModelError, match="the model carries adapters; merge them first"):
            call()
    assert not list(tmp_path.iterdir())


def test_export_takes_whatever_holds_a_compressed_model(place, tmp_path):
    held = rankfold.compress(place / "model", calibration=IDS, sparsity=0.3, target="stock", allocation="uniform")
    written = rankfold.compress(
        place / "model", calibration=IDS, sparsity=0.3, target="stock", allocation="uniform", output=tmp_path / "out"
    )
    made = {
        name: rankfold.export(given, tmp_path / name, "stock", **more)
        for name, given, more in [
            ("result", held, {}),
            ("module", held.model, {"tokenizer": tokenizer()}),
            ("written", written, {}),
            ("folder", tmp_path / "out", {}),
        ]
    }
    models = [t.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in made]
    assert all(same(models[0], other) for other in models[1:])
    for name in made:
        assert t.AutoTokenizer.from_pretrained(tmp_path / name)
    with pytest.raises(OptionError, match="tokenizer is of a model in memory"):
        rankfold.export(tmp_path / "out", tmp_path / "again", tokenizer=tokenizer())


def test_a_type_checker_knows_what_every_public_function_and_result_takes_and_returns():
    public = [getattr(rankfold, name) for name in rankfold.__all__ if name != "__version__"]
    functions = [one for one in public if inspect.isfunction(one)] + [rankfold.CompressionResult.__init__]
    hints = [given.annotation for one in functions for given in inspect.signature(one).parameters.values()]
    hints += [inspect.signature(one).return_annotation for one in functions]
    hints += [field.type for field in dataclasses.fields(rankfold.RecoveryResult)]
    assert [hint for hint in hints if hint in (dict, list, tuple)] == []
    bare = {
        (one.__qualname__, name)
        for one in functions
        for name, parameter in inspect.signature(one).parameters.items()
        if parameter.annotation is inspect.Parameter.empty and name != "self"
    }
    assert bare == set()
