"""`auto` is the dtype that transformers' ``dtype="auto"`` gives a checkpoint: its config's, or its first tensor's."""

import json
import shutil

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

import rankfold
from families import tiny_model, tokens
from rankfold.checkpoint.compressed import open_compressed
from rankfold.errors import CheckpointError
from saved import save_tiny

METHOD = rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def rewrite(folder, dtype_of, **fields):
    """Give every tensor the dtype of its place in the file, and take the dtype out of the config."""
    state = load_file(folder / "model.safetensors")
    changed = {name: state[name].to(dtype_of(name)) for name in state}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        part.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config | fields))


def shard(folder):
    """The last tensors by name in the first file."""
    state = load_file(folder / "model.safetensors")
    names = sorted(state, reverse=True)
    files = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, some in files.items():
        save_file({name: state[name] for name in some}, folder / file, metadata={"format": "pt"})
    named = {name: file for file, some in files.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))
    (folder / "model.safetensors").unlink()


CASES = {
    "bf16": (lambda name: torch.bfloat16, {}),
    "fp16": (lambda name: torch.float16, {}),
    "fp32": (lambda name: torch.float32, {}),
    "norms in fp32": (lambda name: torch.float32 if "norm" in name else torch.bfloat16, {}),
    "embedding in fp32": (lambda name: torch.float32 if "embed" in name else torch.bfloat16, {}),
    "head in fp32": (lambda name: torch.float32 if "lm_head" in name else torch.bfloat16, {}),
    "named as before": (lambda name: torch.float32, {"torch_dtype": "bfloat16"}),
    "config of another": (lambda name: torch.bfloat16, {"dtype": "float32"}),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_auto_is_what_transformers_takes(tmp_path, case, sharded):
    dtype_of, fields = CASES[case]
    folder = save_tiny(tmp_path / "dense", blocks=2)
    rewrite(folder, dtype_of, **fields)
    if sharded:
        shard(folder)
    expected = t.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype
    assert expected in FLOATS
    source = rankfold.open_model(folder, device="cpu")
    assert source.dtype == expected
    assert open_compressed(folder).dtype == expected
    assert rankfold.load(folder, device="cpu").dtype == expected
    small = rankfold.compress(source, method=METHOD, calibration=tokens(), output=tmp_path / "small").output
    written = [x for file in small.glob("*.safetensors") for x in load_file(file).values() if x.is_floating_point()]
    assert {x.dtype for x in written} == {expected}
    assert json.loads((small / "config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_export_has_the_dtype_of_a_compressed_checkpoint_that_does_not_name_it(tmp_path, dtype):
    folder = save_tiny(tmp_path / "dense", blocks=2)
    rewrite(folder, lambda name: dtype)
    small = rankfold.compress(
        rankfold.open_model(folder, device="cpu"), method=METHOD, calibration=tokens(), output=tmp_path / "small"
    ).output
    config = json.loads((small / "config.json").read_text())
    del config["dtype"]
    (small / "config.json").write_text(json.dumps(config))
    assert rankfold.load(small, device="cpu").dtype == dtype
    rankfold.export(small, tmp_path / "stock")
    assert {x.dtype for file in (tmp_path / "stock").glob("*.safetensors") for x in load_file(file).values()} == {dtype}


def test_a_model_of_several_parts_has_the_dtype_that_its_own_config_names(tmp_path):
    """The config of its language model names another one; transformers does not ask it."""
    folder = tmp_path / "images"
    tiny_model("gemma3-images").to(torch.bfloat16).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["dtype"] = "float16"
    for name in ("bfloat16", "float32", None):
        config["dtype"] = name
        (folder / "config.json").write_text(json.dumps(config))
        expected = t.AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").dtype
        assert rankfold.open_model(folder, device="cpu").dtype == expected


def test_a_dtype_of_tensors_that_is_not_written_is_said_of_the_tensors(tmp_path):
    folder = save_tiny(tmp_path / "dense", blocks=2)
    rewrite(folder, lambda name: torch.float64)
    with pytest.raises(
        CheckpointError, match="the tensors in .*dense have the dtype float64, which is not one of float32"
    ):
        rankfold.open_model(folder, device="cpu")
    assert rankfold.open_model(folder, dtype="float32", device="cpu").dtype == torch.float32


def test_a_file_of_the_name_of_a_single_one_is_read_before_an_index(tmp_path):
    folder = save_tiny(tmp_path / "dense", blocks=2)
    shutil.copy(folder / "model.safetensors", tmp_path / "single")
    rewrite(folder, lambda name: torch.float16)
    shard(folder)
    shutil.copy(tmp_path / "single", folder / "model.safetensors")
    assert t.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.float32
    assert rankfold.open_model(folder, device="cpu").dtype == torch.float32


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_whole_model_is_rounded_as_its_blocks_are(in_memory, tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    source = rankfold.open_model(model if in_memory else tmp_path, dtype="bfloat16", device="cpu")
    whole = source.whole_model()
    weights, tables = whole.state_dict(), [b for name, b in whole.named_buffers() if name.endswith("inv_freq")]
    assert tables and all(torch.equal(table, source.inv_freq(0)) for table in tables)
    assert all(torch.equal(weight, weight.bfloat16().to(weight.dtype)) for weight in weights.values())
    for index in range(len(source)):
        for name, weight in source.block(index).module.state_dict().items():
            assert torch.equal(weights[f"model.layers.{index}.{name}"].float(), weight.float())
    assert not in_memory or any(not torch.equal(p, p.bfloat16().float()) for p in model.parameters())  # as it was
