"""What a model is called that is given by a path."""

import pytest

import rankfold
from families import tiny_model


@pytest.mark.parametrize("given", [".", "./"])
def test_the_folder_one_stands_in_has_its_name(given, tmp_path, monkeypatch):
    tiny_model("llama").save_pretrained(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    assert rankfold.open_model(given, device="cpu").name == "mine"
