"""Checkpoints of earlier formats load: the code of that format wrote the folders in ``format_1``, logits included."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import rankfold
from rankfold.errors import CheckpointError
from rankfold.modules import FORMAT

EARLIER = Path(__file__).with_name("format_1")
FORMS = ("plain", "identity", "lu", "split", "heads", "quantised")


@torch.no_grad()
def logits(model, form: str) -> torch.Tensor:
    return model.eval()(load_file(EARLIER / form / "expected.safetensors")["ids"]).logits


def expected(form: str) -> torch.Tensor:
    return load_file(EARLIER / form / "expected.safetensors")["logits"]


def copied(form: str, folder: Path) -> Path:
    shutil.copytree(EARLIER / form, folder, ignore=shutil.ignore_patterns("expected*"))
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_it_loads_computes_the_same_and_is_saved_in_this_format(form, tmp_path):
    folder = copied(form, tmp_path / "old")
    model = rankfold.load(folder, device="cpu")
    torch.testing.assert_close(logits(model, form), expected(form), rtol=1e-5, atol=1e-6)
    direct = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(direct, form), logits(model, form))
    direct.save_pretrained(tmp_path / "new")
    assert json.loads((tmp_path / "new/config.json").read_text())["quantization_config"]["format"] == FORMAT
    names = set(load_file(tmp_path / "new/model.safetensors"))
    assert names == set(direct.state_dict()) - set(direct.all_tied_weights_keys)
    assert torch.equal(logits(rankfold.load(tmp_path / "new", device="cpu"), form), logits(model, form))


@pytest.mark.parametrize("form", FORMS)
def test_the_factors_that_are_matrices_are_linear_layers(form):
    model = rankfold.load(EARLIER / form, device="cpu")
    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if type(m) is torch.nn.Linear}
    assert ({"A", "B"} <= linear) == (form in ("plain", "identity", "split", "heads"))


def test_what_the_file_has_under_the_earlier_name_is_checked(tmp_path):
    folder = copied("plain", tmp_path / "old")
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.mlp.up_proj.A"] = state["model.layers.0.mlp.up_proj.A"].long()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"up_proj\.A\.weight holds I64 in .*, and must hold floating-point numbers"
    ):
        rankfold.load(folder, device="cpu")
