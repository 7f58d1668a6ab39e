"""A model in a 16-bit float is slow on a processor without instructions for it, and the command says what to do."""

import pytest

import rankfold
from families import tiny_model
from rankfold.cli.app import app
from rankfold.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("stored")
    tiny_model("llama").bfloat16().save_pretrained(path)
    return path


@pytest.mark.parametrize("slow, dtype, said", [(True, "auto", True), (True, "float32", False), (False, "auto", False)])
def test_it_is_said_where_the_processor_is_slow_and_nothing_was_asked_for(
    folder, monkeypatch, caplog, slow, dtype, said
):
    monkeypatch.setattr("rankfold.models.devices.multiplies_slowly", lambda dtype: slow)
    rankfold.load(folder, dtype=dtype, device="cpu")
    assert ("run in bfloat16, and this" in caplog.text and "dtype='float32'" in caplog.text) == said


@pytest.mark.parametrize("dtype, said", [("auto", True), ("bfloat16", False)])
def test_a_comparison_says_it_where_nothing_was_asked_for(folder, monkeypatch, caplog, dtype, said):
    monkeypatch.setattr("rankfold.models.devices.multiplies_slowly", lambda dtype: True)
    grid = ["--methods", "svd", "--sparsities", "0.1", "--text", str(folder / "none.txt"), "-o", str(folder / "report")]
    with pytest.raises(DataError, match="no text at"):  # which comes after it
        app(["compare", str(folder), *grid, "--dtype", dtype, "--device", "cpu"], standalone_mode=False)
    assert ("run in bfloat16, and this" in caplog.text) == said
