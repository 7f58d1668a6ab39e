"""What transformers overlooks in a GGUF file is read or refused: the reference is the model the file was written of."""

import gguf
import pytest
import torch
import transformers

import rankfold
from families import some_ids, tokens
from rankfold.errors import CheckpointError, UnsupportedModelError
from rankfold.models.gguf_config import LLAMA3, gguf_config
from saved import save_gguf, save_tiny

STRETCHED = LLAMA3 | {"rope_theta": 10000.0, "factor": 8.0}
SHORT = STRETCHED | {"original_max_position_embeddings": 32}  # so that 128 positions are stretched much
OPTIONS = {
    "llama3": {"rope_parameters": STRETCHED},
    "other frequencies": {"rope_parameters": SHORT},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "biases of attention": {"attention_bias": True},
}


def exported(folder, **options):
    """A random model, its biases too, and the file of it."""
    save_tiny(folder / "model", blocks=2, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder / "model")
    rankfold.export(folder / "model", folder / "x.gguf", "gguf")
    return model.eval(), folder / "x.gguf"


@torch.no_grad()
def assert_same(model, other):
    torch.testing.assert_close(other(some_ids()).logits, model(some_ids()).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_is_in_the_file_is_computed(options, tmp_path):
    model, file = exported(tmp_path, **options)
    assert_same(model, rankfold.load(file, device="cpu", dtype="float32"))
    source = rankfold.open_model(file, dtype="float32", device="cpu")
    source.autocast = None
    assert_same(model, source.whole_model())
    small = rankfold.compress(
        source, method=rankfold.MoDeGPT(sparsity=0, rank_multiple=2), calibration=tokens(), output=tmp_path / "small"
    ).output
    assert_same(model, rankfold.load(small, device="cpu"))


def test_frequencies_of_llama_3_are_called_by_their_name(tmp_path):
    _, file = exported(tmp_path, rope_parameters=STRETCHED | {"rope_theta": 500000.0})
    assert gguf_config(file)[0].rope_parameters == STRETCHED | {"rope_theta": 500000.0}


def test_a_file_that_says_linear_is_linear(tmp_path, monkeypatch):
    stretch(monkeypatch, gguf.RopeScalingType.LINEAR, 4.0)
    file = save_gguf(save_tiny(tmp_path / "model", blocks=2), tmp_path / "x.gguf")
    found = gguf_config(file)[0].rope_parameters
    assert found == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}


def test_of_gemma_3_only_layers_without_a_window_are_stretched(tmp_path, monkeypatch):
    """As in llama.cpp, and in its config of 4 billion parameters."""
    stretch(monkeypatch, gguf.RopeScalingType.LINEAR, 8.0)
    file = save_gguf(save_tiny(tmp_path / "model", blocks=2), tmp_path / "x.gguf")
    before = transformers.Gemma3TextConfig().rope_parameters
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: transformers.Gemma3TextConfig())
    found = gguf_config(file)[0].rope_parameters
    assert found["sliding_attention"] == before["sliding_attention"]
    assert found["full_attention"] == before["full_attention"] | {"rope_type": "linear", "factor": 8.0}


def test_what_no_config_is_made_of_is_refused(tmp_path, monkeypatch):
    stretch(monkeypatch, gguf.RopeScalingType.YARN, 4.0)
    file = save_gguf(save_tiny(tmp_path / "model", blocks=2), tmp_path / "x.gguf")
    for read in (rankfold.open_model, rankfold.load):
        with pytest.raises(UnsupportedModelError, match="stretches rotary frequencies by 'yarn', .*take the folder"):
            read(file, device="cpu")


def stretch(monkeypatch, kind, factor: float) -> None:
    """Let files that are written say how their frequencies are stretched."""
    write = gguf.GGUFWriter.add_vocab_size

    def both(self, size):
        write(self, size)
        self.add_rope_scaling_type(kind)
        self.add_rope_scaling_factor(factor)

    monkeypatch.setattr(gguf.GGUFWriter, "add_vocab_size", both)


def test_biases_that_the_model_has_no_place_for_are_refused(tmp_path, monkeypatch):
    _, file = exported(tmp_path, attention_bias=True)
    monkeypatch.setattr("rankfold.models.gguf_config.BIASES", {})
    for read in (rankfold.open_model, rankfold.load):
        with pytest.raises(
            CheckpointError, match="has 192 numbers in biases and the model that transformers makes of it 0"
        ):
            read(file, device="cpu")


def test_a_model_may_be_called_mistral(tmp_path):
    folder = save_tiny(tmp_path / "mistral", blocks=2)
    assert rankfold.export(folder, tmp_path / "x.gguf", "gguf").difference < 1e-5


@pytest.mark.parametrize("length", [3, 10, 40, 150, 400, 2000])
def test_a_file_that_is_cut_is_one_line(length, tmp_path):
    whole = save_gguf(save_tiny(tmp_path / "model", blocks=2), tmp_path / "x.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:length])
    for read in (rankfold.open_model, rankfold.load):
        with pytest.raises(CheckpointError, match="cut.gguf cannot be"):
            read(tmp_path / "cut.gguf", device="cpu")


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "blk.0.attn_q.weight.lora_a",
            r"x.gguf is an adapter without a model \(blk.0.attn_q.weight.lora_a\); merge it with",
        ),
        (
            "token_embd.weight",
            r"x.gguf holds 128 numbers, and its config describes [\d,]{13}; download or copy it again",
        ),
    ],
)
@pytest.mark.parametrize("read", [rankfold.load, rankfold.open_model])
def test_a_file_without_most_of_its_model_is_refused_before_the_model_is_made(
    tmp_path, monkeypatch, name, message, read
):
    """Its config would be that of a model of seven billion parameters."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor(name, torch.ones(4, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read(tmp_path / "x.gguf", device="cpu")
