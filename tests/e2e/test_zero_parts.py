"""Parts of a model that do nothing: they must not stop a run, and compressing them has error exactly 0."""

import json
import re
import shutil

import pytest
import torch
import transformers as t
from attacks.arena import call

import rankfold
from families import some_ids
from saved import save_text, save_tiny

METHODS = ["modegpt", "latentllm", "rootcov", "svd-llm", "fwsvd", "magnitude", "strided", "flap", "kobd", "llm-surgeon"]
OPTIONS = ["sparse=0.3", "sparse=1", "joint=vo", "bits=4"]  # forms of the latent methods with errors of their own
SIZES = {"num_samples": 4, "max_length": 64}
TEXT = "--calibration text.txt --num-samples 4 --max-length 64"
LINE = f"-o out --exclude-blocks 0 --sparsity 0.3 --rank-multiple 2 --device cpu {TEXT}"
PARTS = {  # what of the last block is zero -> modules whose error is
    ("llama", r"mlp"): {"mlp", "gate", "up", "down"},
    ("llama", r"up_proj"): {"mlp", "up", "down"},
    ("llama", r"post_attention_layernorm"): {"mlp", "gate", "up", "down"},
    ("llama", r"self_attn"): {"heads", "qk", "vo", "q", "k", "v", "o"},
    ("llama", r"v_proj"): {"heads", "vo", "v", "o"},
    ("opt", r"fc"): {"mlp", "up", "down"},
    ("opt", r"self_attn|fc"): {"heads", "mlp", "qk", "vo", "q", "k", "v", "o", "up", "down"},
    ("opt", r"layer_norm"): {"heads", "mlp", "qk", "vo", "q", "k", "v", "o", "up", "down"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A text and models with a tokenizer, both without biases that matter."""
    folder = tmp_path_factory.mktemp("zero")
    save_text(folder / "text.txt")
    save_tiny(folder / "llama", blocks=2)
    shutil.copytree(folder / "llama", folder / "opt")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_attention_heads": 4, "vocab_size": 400}
    config = t.OPTConfig(num_hidden_layers=2, max_position_embeddings=128, dropout=0.0, **sizes)
    t.OPTForCausalLM(config).save_pretrained(folder / "opt")
    return folder


def compress(place, family: str, change, method: str, *options: str):
    """The record of compressing the last block of a changed model, and its logits and the compressed one's."""
    for name in ("model", "out"):
        shutil.rmtree(place / name, ignore_errors=True)
    shutil.copytree(place / family, place / "model")
    model = t.AutoModelForCausalLM.from_pretrained(place / family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.1." in name:
                change(name, parameter)
        model.save_pretrained(place / "model")
        code, err = call(place, ["compress", "model", *LINE.split(), "--method", method, *options])
        assert code == 0, err
        record = json.loads((place / "out" / "rankfold.json").read_text())["blocks"]["1"]
        return record, model(some_ids()).logits, rankfold.load(place / "out")(some_ids()).logits


@pytest.fixture(scope="module")
def texts(place):
    """The text as each model reads it."""
    sources = {family: rankfold.open_model(place / family, device="cpu") for family in ("llama", "opt")}
    return {name: rankfold.load_calibration(place / "text.txt", source, **SIZES) for name, source in sources.items()}


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family, zero", PARTS)
def test_a_part_that_is_zero_has_error_zero(place, texts, family, zero, method):
    model = t.AutoModelForCausalLM.from_pretrained(place / family)
    for name, parameter in model.named_parameters():
        if re.search(rf"layers\.1\..*({zero})", name):
            parameter.zero_()
    options = {"exclude_blocks": (0,), "rank_multiple": 2, "device": "cpu"}
    result = rankfold.compress(model, 0.3, method=method, calibration=texts[family], **options)
    record, dense, logits = result.record["blocks"]["1"], model(some_ids()).logits, result.model(some_ids()).logits
    silent = PARTS[family, zero] & record.keys()
    assert silent and {record[m]["relative_error"] for m in silent} == {0.0}
    assert all(record[m]["rank"] < record[m]["of"] for m in record), "not compressed"
    if silent == record.keys():
        torch.testing.assert_close(logits, dense)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("family, zero", [("llama", "proj"), ("opt", "self_attn|fc"), ("opt", "layer_norm")])
def test_whatever_the_form(place, family, zero, option):
    def change(name, parameter):
        if re.search(zero, name):
            parameter.zero_()

    record, dense, logits = compress(place, family, change, "latentllm", "--set", option)
    assert {part["relative_error"] for part in record.values()} == {0.0}
    torch.testing.assert_close(logits, dense)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_block_that_always_says_the_same_has_an_error_of_rounding(place, option, monkeypatch):
    """The output does not vary, so an error relative to how much it varies would be infinite.

    Forwards are in bf16 on every machine: fp32 sums of such numbers are exact. Those of fp32 numbers are not, and an
    error relative to what their rounding leaves of the variance is any number.
    """
    monkeypatch.setattr("rankfold.models.devices.multiplies_bf16_fast", lambda: True)

    def change(name, parameter):
        if "layer_norm.weight" in name:
            parameter.zero_()
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))

    record, dense, logits = compress(place, "opt", change, "latentllm", "--set", option)
    assert max(part["relative_error"] for part in record.values()) < 1e-2
    torch.testing.assert_close(logits, dense, rtol=1e-3, atol=1e-3)
