"""A compressed model goes to the hub with the code that loads it; the hub itself is stood in for."""

import os
from types import SimpleNamespace

import pytest
import torch
import transformers as t

import rankfold
from families import opened, tokens
from rankfold import MoDeGPT
from rankfold.modules import CODE_FILE


class Hub:
    """Takes repositories and uploads, and notes what came."""

    def __init__(self, monkeypatch):
        self.repositories, self.uploads = [], []
        card = SimpleNamespace(save=lambda path: None)
        for module in (t.modeling_utils, t.utils.hub):
            monkeypatch.setattr(module, "hf_api", lambda: self)
            monkeypatch.setattr(module, "create_and_tag_model_card", lambda *args, **kwargs: card)
        monkeypatch.setattr(t.PreTrainedModel, "_upload_modified_files", self.upload)

    def create_repo(self, repo_id, **options):
        self.repositories.append((repo_id, options.get("private"), options.get("token")))
        return SimpleNamespace(repo_id=repo_id)

    def upload(self, folder, repo_id, files_timestamps, commit_message=None, **options):
        new = {name for name in os.listdir(folder) if name not in files_timestamps}
        self.uploads.append((repo_id, commit_message, new))


@pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained"])
def test_what_is_pushed_has_the_code_beside_the_weights(way, tmp_path, monkeypatch):
    model, hub = (
        rankfold.compress(opened("llama"), method=MoDeGPT(rank_multiple=2), calibration=tokens()).model,
        Hub(monkeypatch),
    )
    options = {"commit_message": "smaller", "private": True, "token": "t"}
    if way == "push_to_hub":
        model.push_to_hub("me/small", **options)
    else:
        model.save_pretrained(tmp_path / "small", push_to_hub=True, repo_id="me/small", **options)
        assert (tmp_path / "small" / CODE_FILE).exists()
    ((repository, message, files),) = hub.uploads
    assert (repository, message) == ("me/small", "smaller")
    assert hub.repositories == [("me/small", True, "t")]
    assert files >= {"config.json", "model.safetensors", CODE_FILE}


def test_without_a_name_the_folder_names_the_repository(tmp_path, monkeypatch):
    model, hub = (
        rankfold.compress(opened("llama"), method=MoDeGPT(rank_multiple=2), calibration=tokens()).model,
        Hub(monkeypatch),
    )
    model.save_pretrained(tmp_path / "small", push_to_hub=True)
    assert [(repository, CODE_FILE in files) for repository, _, files in hub.uploads] == [("small", True)]


def test_a_state_that_is_given_is_what_is_written(tmp_path):
    """As Trainer gives what it gathered of a sharded model."""
    model = rankfold.compress(opened("llama"), method=MoDeGPT(rank_multiple=2), calibration=tokens()).model
    given = {name: 2 * x if x.is_floating_point() else x for name, x in model.state_dict().items()}
    model.save_pretrained(tmp_path / "small", state_dict=dict(given))
    written = t.AutoModelForCausalLM.from_pretrained(tmp_path / "small").state_dict()
    assert all(torch.equal(written[name], given[name]) for name in given)
    assert model.hf_quantizer is not None
