"""Models larger than memory: perplexity one block at a time, and layers spread over devices and the disk."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import rankfold
from families import some_ids, tiny_model, tokens
from rankfold import make_method
from rankfold.checkpoint.streamed import open_streamed
from rankfold.errors import CheckpointError, OptionError
from rankfold.evaluation.evaluate import evaluate
from rankfold.evaluation.perplexity import streamed_perplexity
from rankfold.evaluation.tasks import Questions
from rankfold.models.dense_model import DenseModel
from saved import save_gguf, save_text, save_tiny

IDS = some_ids(5, 24, seed=3)
METHODS = [
    *(("llama", "rankfold"), ("llama", "latentllm"), ("llama", "slicegpt"), ("llama", "shortgpt")),
    *(("opt", "latentllm"), ("gpt2", "modegpt"), ("mixtral", "modegpt"), ("gemma3", "modegpt")),
]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "llama-mha-tied", "opt", "gpt2", "gpt_oss", "gemma3", "falcon-gqa"])
def test_a_streamed_dense_model_has_the_perplexity_of_the_whole(family, dtype, tmp_path):
    tiny_model(family).save_pretrained(tmp_path / "model")
    assert_streams(tmp_path / "model", dtype)


@pytest.mark.parametrize("family, method", METHODS)
def test_a_streamed_compressed_model_has_the_perplexity_of_the_whole(family, method, tmp_path):
    options = {"rank_multiple": 2} if method in ("rankfold", "latentllm", "modegpt") else {}
    source = rankfold.open_model(tiny_model(family), device="cpu")
    made = make_method(method, sparsity=0.34, **options)
    rankfold.compress(source, method=made, calibration=tokens(), output=tmp_path / "small")
    assert_streams(tmp_path / "small", "auto")


def assert_streams(folder, dtype: str) -> None:
    """The streamed perplexity is the whole model's up to rounding, and no block stays."""
    whole = rankfold.perplexity(folder, IDS, dtype=dtype, device="cpu")
    source = open_streamed(folder, dtype=dtype, device="cpu")
    streamed = streamed_perplexity(source, IDS)
    assert all(parameter.is_meta for parameter in source.blocks.parameters())
    assert source.compute_dtype is torch.float32 or dtype == "bfloat16"
    close = 1e-5 if dtype == "auto" else 2e-3
    assert abs(streamed["nll"] - whole["nll"]) < close * whole["nll"]
    assert streamed["peak_memory_bytes"] > 0 and streamed["peak_device_memory_bytes"] is None
    assert {key: streamed[key] for key in ("windows", "length", "tokens", "definition")} == {
        key: whole[key] for key in ("windows", "length", "tokens", "definition")
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    save_tiny(folder / "model")
    save_text(folder / "text.txt")
    return folder


def test_the_command_streams_and_says_what_memory_it_took(run, place):
    line = "evaluate model --text text.txt --max-length 32 --limit 3 --device cpu"
    code, whole, _ = run(f"{line} --json")
    assert code == 0
    code, streamed, _ = run(f"{line} --json --stream")
    assert code == 0
    whole, streamed = json.loads(whole), json.loads(streamed)
    assert abs(streamed["nll"] - whole["nll"]) < 1e-5 and "peak_memory_bytes" not in whole
    code, shown, _ = run(f"{line} --stream")
    assert code == 0 and f"; peak memory {streamed['peak_memory_bytes'] / 2**30:.2f}"[:17] in shown.replace("\n", " ")
    code, _, error = run(f"{line} --stream --speed")
    assert (
        code == 2
        and "--stream reads one block at a time, for texts; leave it out for --tasks, --generation and --speed" in error
    )


def test_a_stream_holds_one_block_at_a_time(place, monkeypatch):
    moved, alive = DenseModel.moved, []

    def noting(self, index, module):
        alive.append(sum(not parameter.is_meta for parameter in self.blocks.parameters()))
        return moved(self, index, module)

    monkeypatch.setattr(DenseModel, "moved", noting)
    rankfold.perplexity(place / "model", IDS, device="cpu", stream=True)
    assert alive == [0] * 4


def test_what_cannot_be_streamed_is_refused(place, tmp_path):
    with pytest.raises(OptionError, match="this one is in memory; leave it out"):
        rankfold.perplexity(tiny_model("llama"), IDS, stream=True)
    file = save_gguf(place / "model", tmp_path / "model.gguf")
    with pytest.raises(OptionError, match="is a GGUF file, which is read as a whole; leave stream out"):
        rankfold.perplexity(file, IDS, stream=True)
    with pytest.raises(OptionError, match="stream reads one block at a time"):
        evaluate(place / "model", questions=Questions(["piqa"]), stream=True)
    with pytest.raises(OptionError, match="is a GGUF file, which is read as a whole; leave device_map out"):
        rankfold.load(file, device_map="cpu")


def test_a_stream_is_of_what_the_whole_is_of(tmp_path, caplog):
    """A head of its own where the config ties one, blocks that the config leaves out, a config of no model."""
    model = tiny_model("llama-mha-tied")
    model.save_pretrained(tmp_path / "untied")
    file, config = tmp_path / "untied" / "model.safetensors", tmp_path / "untied" / "config.json"
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": torch.randn_like(model.lm_head.weight)}, file, {"format": "pt"})
    assert_streams(tmp_path / "untied", "auto")
    assert "the head differs from the embedding" in caplog.text
    for changed, told in (({"num_hidden_layers": 2}, "it leaves out model.layers.2"), ({"head_dim": 0}, "cannot be")):
        plain = json.loads(config.read_text())
        config.write_text(json.dumps(plain | changed))
        with pytest.raises(CheckpointError, match=told):
            open_streamed(tmp_path / "untied", device="cpu")
        config.write_text(json.dumps(plain))


@pytest.mark.parametrize("method", [None, "latentllm"])
def test_layers_may_be_on_the_disk(method, tmp_path):
    model = tiny_model("llama-mha-tied")
    folder = tmp_path / "model"
    if method is None:
        model.save_pretrained(folder)
    else:
        made = make_method(method, sparsity=0.3, rank_multiple=2)
        rankfold.compress(rankfold.open_model(model, device="cpu"), method=made, calibration=tokens(), output=folder)
    whole = rankfold.load(folder, device="cpu")
    for spread in (
        {"device_map": "cpu"},
        {"device_map": "auto", "max_memory": {"cpu": sum(p.nbytes for p in whole.parameters()) // 2}},
    ):
        found = rankfold.load(folder, **spread, offload_folder=tmp_path / "offload")
        placed = getattr(found, "hf_device_map", {}).values()  # of one device there is none
        assert ("disk" in placed) == ("max_memory" in spread)
        assert found.config.tie_word_embeddings
        assert torch.equal(found(IDS).logits, whole(IDS).logits)
    with pytest.raises(OptionError, match="device_map with device 'cpu'; give one of them"):
        rankfold.load(folder, device="cpu", device_map="cpu")
