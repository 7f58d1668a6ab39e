"""Costs against what is known: bytes of files, a memory block of known size, a clock that is turned by hand."""

import gc
import os

import pytest
import torch
from safetensors.torch import load_file

from families import tiny_model
from rankfold._utils.evaluating import cache_for
from rankfold.errors import OptionError, RankfoldError
from rankfold.evaluation import cost as module
from rankfold.evaluation import evaluate as evaluating
from rankfold.evaluation import speed as timing
from rankfold.evaluation.cost import Cost, bytes_on_disk, peak_memory
from rankfold.evaluation.speed import speed
from rankfold.evaluation.writing import Writing
from rankfold.report.record import environment
from saved import save_gguf, save_tiny
from tiny_encoders import tiny_encoder

TELLS_PEAKS = os.access("/proc/self/clear_refs", os.W_OK)


def test_bytes_on_disk_are_those_of_the_weights(tmp_path):
    folder = save_tiny(tmp_path / "model", blocks=1)
    tensors = load_file(folder / "model.safetensors").values()
    assert bytes_on_disk(folder) == sum(t.nbytes for t in tensors) < (folder / "model.safetensors").stat().st_size
    file = save_gguf(folder, tmp_path / "tiny.gguf")
    assert bytes_on_disk(file) == file.stat().st_size


def test_what_is_decoded_is_what_generate_writes():
    model, ids, given = tiny_model("llama"), torch.arange(3, 11).view(2, 4), []
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    model.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    assert min(timing.run(model, ids, steps=5)) > 0
    assert [one.shape[1] for one in given] == [4, 1, 1, 1, 1, 1]  # what came before is in the cache
    assert torch.equal(torch.cat(given, dim=1), written)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_has_the_name_that_the_forward_gives_it(name):
    model = tiny_model("llama")
    model.forward = {
        "cache": lambda ids, cache=None: ids,  # transformers >= 5.24
        "past_key_values": lambda ids, past_key_values=None: ids,
    }[name]
    assert list(cache_for(model)) == [name]


def test_six_rounds_of_ids_that_all_models_know(monkeypatch):
    models, largest = {"a": tiny_model("llama"), "b": tiny_model("llama")}, []
    models["b"].config.vocab_size = 7
    monkeypatch.setattr(timing, "run", lambda _, ids, steps: largest.append(int(ids.max())) or (1.0, 1.0))
    speed(models, prompt=62, steps=2)
    assert largest == [6] * 12  # five rounds, and the one before them


def test_speeds_of_a_clock_turned_by_hand(monkeypatch):
    models = {"dense": tiny_model("llama"), "small": tiny_model("llama")}
    seconds = iter([(9.0, 9.0)] * 2 + [(2.0, 8.0), (1.0, 2.0), (1.0, 4.0), (4.0, 8.0), (2.0, 8.0), (2.0, 4.0)])
    order = {id(m): name for name, m in models.items()}
    seen = []

    def run(model, ids, steps):
        seen.append(order[id(model)])
        return next(seconds)

    monkeypatch.setattr(timing, "run", run)
    found = speed(models, batch=3, prompt=8, steps=4, repeats=3)["models"]
    assert seen == ["dense", "small", "small", "dense"] * 2  # in turning order, the first round not counted
    dense, small = found["dense"], found["small"]
    # Rounds of dense: (1, 2), (1, 4), (2, 4); of small: (2, 8), (4, 8), (2, 8).
    assert dense["prefill_tokens_per_second"] == 24 and dense["prefill_range"] == [12, 24]
    assert small["decode_tokens_per_second"] == 12 / 8 and small["decode_ratio"] == 0.5
    assert dense["first_token_seconds"] == 1 and small["first_token_seconds"] == 2


def test_peak_memory_is_the_weights_and_what_a_run_takes(monkeypatch):
    model, mib = tiny_model("llama-mha-tied"), 2**20
    held = {id(p): p.nbytes for p in model.parameters()} | {id(b): b.nbytes for b in model.buffers()}
    ids = torch.zeros(1, 4, dtype=torch.long)
    monkeypatch.setattr(module, "run", lambda *_: torch.ones(64 * mib // 4).sum())
    peak = peak_memory(model, ids, 1)
    if peak is None and not TELLS_PEAKS:
        pytest.skip("this system does not tell a process its peak memory")
    # Pages are counted in bundles, and a little was there already.
    assert 63 * mib <= peak - sum(held.values()) < 72 * mib
    monkeypatch.setattr(module, "run", lambda *_: None)
    assert peak_memory(model, ids, 1) - sum(held.values()) < 4 * mib  # the peak before is forgotten


def test_garbage_that_is_freed_meanwhile_hides_no_memory(monkeypatch):
    model, mib = tiny_model("llama-mha-tied"), 2**20
    ids = torch.zeros(1, 4, dtype=torch.long)
    monkeypatch.setattr(module, "run", lambda *_: (gc.collect(), torch.ones(64 * mib // 4).sum()))
    circle = [torch.ones(128 * mib // 4)]
    circle.append(circle)
    del circle
    if (peak := peak_memory(model, ids, 1)) is None and not TELLS_PEAKS:
        pytest.skip("this system does not tell a process its peak memory")
    assert peak > 63 * mib


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (Cost("model"), "baseline is the model itself, model"),
        (Cost(None, (1, 0)), "different numbers >= 1, e.g. 1,8,32; got 1,0"),
        (Cost(None, (8, 8)), "got 8,8"),
    ],
)
def test_what_cannot_be_measured(cost, message):
    with pytest.raises(OptionError, match=message):
        cost.check("model")


def test_a_baseline_that_writes_no_text_is_refused_before_anything_is_measured(tmp_path, monkeypatch, subtests):
    folder = save_tiny(tmp_path / "model", blocks=1)
    tiny_encoder("bert").save_pretrained(tmp_path / "bert")
    monkeypatch.setattr(evaluating, "load_model", None)
    asked = {
        "speed": lambda name: {"cost": Cost(against=name)},
        "generation": lambda name: {"writing": Writing(baseline=name)},
    }
    for name, message in {"bert": r"bert is an encoder \(bert\) and predicts", "none": r"no model at .*none"}.items():
        for what, options in asked.items():
            with subtests.test(name, what=what), pytest.raises(RankfoldError, match=message):
                evaluating.evaluate(folder, **options(str(tmp_path / name)))


def test_a_mixture_of_experts_says_that_it_is_not_counted():
    facts = module._facts  # sizes need files, which this model has not
    model = tiny_model("mixtral")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "bytes_on_disk", lambda name: 1)
        found = facts("m", model, 8)
    assert found["macs_per_token"] is None and "routes tokens" in found["not_counted"]
    assert found["parameters"] == sum(p.numel() for p in model.parameters())


def test_every_batch_size_is_measured_with_its_own_prompts(monkeypatch):
    models, given = {"dense": tiny_model("llama"), "small": tiny_model("llama-mha-tied")}, []

    def run(model, ids, steps):
        given.append(ids)
        return 1.0, 1.0

    monkeypatch.setattr(timing, "run", run)
    monkeypatch.setattr(module, "bytes_on_disk", len)
    monkeypatch.setattr(module, "peak_memory", lambda model, ids, steps: (id(model), len(ids), steps))
    found = Cost("dense", (1, 3), repeats=2).measure(models)
    assert [batch["batch"] for batch in found["batches"]] == [1, 3]
    assert [len(ids) for ids in given] == [1] * 6 + [3] * 6  # two models, two rounds and the one before them
    prompt, steps = given[0].shape[1], found["batches"][0]["steps"]
    assert prompt + steps <= models["dense"].config.max_position_embeddings
    for batch in found["batches"]:
        peaks = {name: facts["peak_memory_bytes"] for name, facts in batch["models"].items()}
        assert peaks == {name: (id(model), batch["batch"], steps) for name, model in models.items()}
        assert batch["models"]["small"]["prefill_ratio"] == 1.0
    assert {name: facts["bytes_on_disk"] for name, facts in found["models"].items()} == {"dense": 5, "small": 5}
    assert found["models"]["small"]["parameters"] == sum(p.numel() for p in models["small"].parameters())
    assert found["memory_definition"] == module.MEMORY and found["environment"] == environment(torch.device("cpu"))
