"""The memory that a training states is the memory that it takes."""

import gc

import pytest
import transformers

import rankfold
from allocations import peak_bytes
from families import some_ids
from rankfold.data.calibration_data import CalibrationData
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


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_the_estimate_of_memory_is_what_is_taken(case, bf16, tmp_path, monkeypatch):
    monkeypatch.setattr("rankfold.models.devices.multiplies_bf16_fast", lambda: bf16)
    shape, options = CASES[case]
    config = transformers.LlamaConfig(**(SHAPE | shape), num_attention_heads=8, num_key_value_heads=4)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    source = rankfold.open_model(tmp_path / "dense", device="cpu")
    text = CalibrationData(some_ids(16, 32), "some", "some", 0, held_out=some_ids(2, 32, seed=1))
    rankfold.compress(source, method=rankfold.MoDeGPT(sparsity=0.3), calibration=text, output=tmp_path / "small")
    found = []

    def run():
        ids = some_ids(80, 64, seed=2)
        common = {"max_length": 64, "tokens": 3 * options["batch_tokens"], "device": "cpu"}
        found.append(recover(tmp_path / "small", source, calibration=ids, output=tmp_path / "out", **common | options))

    gc.collect()  # what an earlier run left would count as given back
    peak = peak_bytes(run)
    estimate = found[0].record["recovery"]["estimated"]["peak_memory_bytes"]
    assert 0.9 * peak <= estimate <= 1.3 * peak
