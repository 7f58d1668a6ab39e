"""The memory and the room on the disk that a training states is what it takes."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import rankfold
from allocations import peak_bytes
from families import some_ids
from rankfold.data.calibration_data import CalibrationData
from rankfold.errors import CheckpointError
from rankfold.recovery import judging, training, whole
from rankfold.recovery.recover import recover

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 128}
CASES = {
    "weights": ({"intermediate_size": 4096, "num_hidden_layers": 3}, {"batch_tokens": 64}),
    "activations": ({"num_hidden_layers": 4}, {"batch_tokens": 2048}),
    "accumulated": ({"intermediate_size": 1024}, {"batch_tokens": 4096}),
    "vocabulary": ({"vocab_size": 16384}, {"batch_tokens": 512}),
    "next token": ({"vocab_size": 16384}, {"batch_tokens": 512, "loss": "next-token"}),
    "norms": ({"num_hidden_layers": 4}, {"batch_tokens": 2048, "tune": "norms"}),
    "checkpointing": ({"num_hidden_layers": 6}, {"batch_tokens": 2048, "gradient_checkpointing": True}),
}


def compressed(place, shape):
    """Write a compressed model to ``small``, and return the dense one."""
    config = transformers.LlamaConfig(**(SHAPE | shape), num_attention_heads=8, num_key_value_heads=4)
    transformers.LlamaForCausalLM(config).save_pretrained(place / "dense")
    source = rankfold.open_model(place / "dense", device="cpu")
    text = CalibrationData(some_ids(16, 32), "some", "some", 0, held_out=some_ids(2, 32, seed=1))
    rankfold.compress(source, 0.3, method="strided", calibration=text, output=place / "small")  # in no time
    return source


def recovered(place, source, batch_tokens: int, **options):
    common = {"max_length": 64, "batch_tokens": batch_tokens, "tokens": 3 * batch_tokens, "output": place / "out"}
    ids = some_ids(80, 64, seed=2)
    return recover(place / "small", source, calibration=ids, device="cpu", **common | options)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_the_estimate_of_memory_is_what_is_taken(case, bf16, tmp_path, monkeypatch):
    monkeypatch.setattr("rankfold.models.devices.multiplies_bf16_fast", lambda: bf16)
    shape, options = CASES[case]
    source = compressed(tmp_path, shape)
    found = []

    def run():
        found.append(recovered(tmp_path, source, **options))

    gc.collect()  # what an earlier run left would count as given back
    peak = peak_bytes(run)
    estimate = found[0].record["recovery"]["estimated"]["peak_memory_bytes"]
    assert 0.9 * peak <= estimate <= 1.3 * peak


@pytest.mark.parametrize("tune", ["all", "norms", "lora"])
def test_the_room_on_the_disk_is_what_is_taken_at_most(tune, tmp_path, monkeypatch):
    source, found, stated = compressed(tmp_path, {"intermediate_size": 4096}), [], noted_disk(monkeypatch)
    keep = training.KeepWhole.on_save

    def measured(self, args, *others, **more):
        files = [path for path in Path(args.output_dir).rglob("*") if path.is_file()]
        found.append(sum(path.stat().st_size for path in files))
        keep(self, args, *others, **more)

    monkeypatch.setattr(training.KeepWhole, "on_save", measured)
    recovered(tmp_path, source, batch_tokens=64, tune=tune, lr=1e-3)
    assert 0.95 * max(found) <= stated[0] + 100_000 and stated[0] <= 1.3 * max(found)


@pytest.mark.parametrize("tune", ["all", "lora"])
def test_in_memory_nothing_but_the_best_state_is_on_the_disk(tune, tmp_path, monkeypatch):
    source, found, stated = compressed(tmp_path, {"intermediate_size": 4096}), [], noted_disk(monkeypatch)
    restore = judging.Judge.restore_best

    def measured(self):
        found.append(sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()))
        restore(self)

    monkeypatch.setattr(judging.Judge, "restore_best", measured)
    recovered(tmp_path, source, batch_tokens=64, tune=tune, lr=1e-3, output=None)
    assert stated[0] <= found[0] <= stated[0] + 100_000


def noted_disk(monkeypatch) -> list[int]:
    """Return a list into which goes what runs say that they take on the disk."""
    stated, estimate = [], whole.training_disk
    monkeypatch.setattr(
        whole, "training_disk", lambda *models, **how: stated.append(estimate(*models, **how)) or stated[-1]
    )
    return stated


def test_a_disk_without_room_is_said_before_the_first_step(tmp_path, monkeypatch):
    source = compressed(tmp_path, {})
    monkeypatch.setattr(whole.shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    monkeypatch.setattr(training.Distiller, "train", None)
    with pytest.raises(
        CheckpointError, match=r"training takes [\d.]+ MB on the disk, in .*, and 1\.00 kB are free; free space, choose"
    ):
        recovered(tmp_path, source, batch_tokens=64)


def test_a_disk_that_fills_while_it_trains_is_one_line(tmp_path, monkeypatch):
    source = compressed(tmp_path, {})

    def full(*args, **kwargs):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1632019072 vs 1632018960")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(CheckpointError, match="cannot write .*; free space or choose another folder"):
            recovered(tmp_path, source, batch_tokens=64)
    assert recovered(tmp_path, source, batch_tokens=64).output == tmp_path / "out"  # there is room again
