"""The plan's estimate of memory against what PyTorch's allocator counts, for every method, where moments dominate.

What is done a few hundred rows at a time is done in fewer here, as on models so much wider; held-out samples are there.
"""

import pytest
import torch
import transformers

import rankfold
from allocations import peak_bytes
from families import ANY_MODEL
from rankfold.calibration import moments
from rankfold.calibration.statistics import STORED
from rankfold.compression.importance import available
from rankfold.compression.plan import measuring_memory
from rankfold.compression.validate_spec import validated
from rankfold.linalg import elimination, lowrank, nystrom, psd, residual_correction

ROWS = 64
SPARSITY = dict.fromkeys(("wanda", "sparsegpt", "pruner-zero"), 0.5)
IDS = torch.randint(128, (5, 32), generator=torch.Generator().manual_seed(0))


def written(path, **options):
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 128}
    config = transformers.LlamaConfig(
        **shape | options, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path, max_shard_size="300KB")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("wide") / "model")


@pytest.fixture
def narrow_steps(monkeypatch):
    monkeypatch.setattr(moments, "TILE", ROWS)
    for module in (psd, nystrom, elimination, lowrank):
        monkeypatch.setattr(module, "ROWS", ROWS)
    monkeypatch.setattr(elimination, "PENDING", 32)
    monkeypatch.setattr(psd, "WIDE", 256)
    monkeypatch.setattr(residual_correction, "SKETCH", 16)


@pytest.mark.parametrize("name", ANY_MODEL)
def test_the_estimate_is_what_is_taken(name, folder, narrow_steps, tmp_path):
    source = rankfold.open_model(folder, device="cpu")
    check_estimate(rankfold.make_method(name, sparsity=SPARSITY.get(name, 0.34)), lambda: source, tmp_path)


def test_a_large_vocabulary_is_in_it(tmp_path):
    """Its embeddings when the checkpoint is read back, too, and the logits."""
    folder = written(tmp_path / "model", intermediate_size=64, vocab_size=16384, tie_word_embeddings=True)
    check_estimate(
        rankfold.make_method("strided", sparsity=0.34), lambda: rankfold.open_model(folder, device="cpu"), tmp_path
    )


def check_estimate(method, opened, tmp_path):
    found = []
    data = rankfold.CalibrationData(IDS[:4], "random", "random", 0, held_out=IDS[4:])

    def run():
        found.append(rankfold.compress(opened(), method=method, calibration=data, output=tmp_path / "out"))

    peak = peak_bytes(run)
    assert 0.9 * peak <= found[0].plan.peak_memory_bytes <= 1.3 * peak


@pytest.mark.parametrize(("hidden", "tokens"), [(512, 128), (64, 4096), (256, 16384)])
def test_measuring_takes_what_is_estimated(hidden, tokens, narrow_steps, tmp_path):
    folder = written(tmp_path / "model", intermediate_size=hidden)
    source = rankfold.open_model(folder, device="cpu")
    ids = torch.randint(128, (tokens // 32, 32), generator=torch.Generator().manual_seed(0))
    data = rankfold.CalibrationData(ids, "random", "random", 0)
    estimate = measuring_memory(source, available(validated(source), set(STORED)), ids.numel())
    peak = peak_bytes(lambda: rankfold.calibrate(source, calibration=data, output=tmp_path / "moments"))
    assert 0.9 * peak <= estimate <= 1.3 * peak
