"""A quantised model is refused with how to de-quantise it, and what that writes is opened."""

import json
import re
from importlib.util import find_spec

import pytest
import torch
import transformers as t
from packaging.version import Version
from safetensors.torch import load_file, save_file

import rankfold
from families import GQA, IDS
from rankfold.errors import UnsupportedModelError
from versions import needs

BLOCKS = {
    **GQA,
    "hidden_size": 128,
    "intermediate_size": 128,
    "vocab_size": 128,
    "num_key_value_heads": 4,
}  # whole ones
SHAPE = {**GQA, "hidden_size": 64, "head_dim": 16}


def in_float8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if "_proj" not in name:
        return {name: tensor}
    scale = tensor.abs().max() / 448
    return {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.reshape(1, 1)}


def in_mxfp4(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: tensor}
    experts, inputs, outputs = tensor.shape
    shape = (experts, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": torch.full(shape, 120, dtype=torch.uint8)}


QUANTISERS = {
    "fp8": (
        lambda: t.LlamaForCausalLM(t.LlamaConfig(**BLOCKS)),
        in_float8,
        {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        t.FineGrainedFP8Config,
    ),
    "mxfp4": (
        lambda: t.GptOssForCausalLM(
            t.GptOssConfig(**{**SHAPE, "intermediate_size": 32}, num_local_experts=2, num_experts_per_tok=2, **IDS)
        ),
        in_mxfp4,
        {"modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"]},
        t.Mxfp4Config,
    ),
}


def configure(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("method", QUANTISERS)
def test_the_way_to_a_dense_model_that_is_said_leads_there(tmp_path, method):
    needs("transformers", "5.21", "its own way from fp8 and mxfp4 to a dense model fails")
    make, quantise, fields, config = QUANTISERS[method]
    folder = tmp_path / "quantised"
    make().save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    changed = {key: value for name, tensor in state.items() for key, value in quantise(name, tensor).items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UnsupportedModelError, match="is quantised .* and its config has no quantization_config; start from"
    ):
        rankfold.load(folder, device="cpu")
    configure(folder, quantization_config={"quant_method": method, **fields})
    said = (
        rf"quantised \({method}\); .*quantization_config={config.__name__}\(dequantize=True\)"
        r".*save_original_format=False"
    )
    with pytest.raises(UnsupportedModelError, match=said):
        rankfold.open_model(folder, device="cpu")

    model = t.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config(dequantize=True))
    model.save_pretrained(tmp_path / "again")
    if Version(t.__version__) < Version("5.24"):  # which saves it dense at once
        with pytest.raises(UnsupportedModelError, match=re.escape("save_pretrained(OUT, save_original_format=False)")):
            rankfold.open_model(tmp_path / "again", device="cpu")
    model.save_pretrained(tmp_path / "dense", save_original_format=False)
    source = rankfold.open_model(tmp_path / "dense", device="cpu")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected, got = model(ids).logits.float(), source.whole_model()(ids).logits.float()
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05 * expected.abs().max().item())


@pytest.mark.skipif(find_spec("optimum") is not None, reason="optimum is installed")
def test_a_package_that_is_missing_is_named(tmp_path):
    t.LlamaForCausalLM(t.LlamaConfig(**GQA)).save_pretrained(tmp_path / "gptq")
    configure(tmp_path / "gptq", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    with pytest.raises(
        UnsupportedModelError, match=r"gptq needs a package that is not installed \(.*optimum.*\); install"
    ):
        rankfold.load(tmp_path / "gptq", device="cpu")
