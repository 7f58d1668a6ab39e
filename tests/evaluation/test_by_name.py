"""A model by name is evaluated and writes as the same one in memory, in the dtype and on the device asked for."""

import json

import pytest
import torch

import rankfold
from rankfold.checkpoint.load import load_model, load_tokenizer
from rankfold.errors import UnsupportedModelError
from rankfold.evaluation import evaluate as evaluating
from rankfold.evaluation import generation
from rankfold.evaluation.perplexity import perplexity
from rankfold.evaluation.writing import Writing
from saved import save_tiny
from tiny_encoders import tiny_encoder

ROWS = [{"body": f"a class of {n} values and a list of them, number {n}", "text": "other"} for n in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("named") / "model", blocks=1)


@pytest.fixture
def loaded(monkeypatch):
    """Name, dtype and device of every model that is loaded."""
    seen = []

    def load(name, *, dtype, device):
        seen.append((str(name), dtype, device))
        return load_model(name, dtype="float32" if dtype == "auto" else dtype, device="cpu")

    for module in (evaluating, generation):
        monkeypatch.setattr(module, "load_model", load)
    return seen


def test_a_text_has_the_perplexity_of_the_model_in_memory(folder, loaded, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    asked = {"max_length": 16, "limit": 3, "text_column": "body"}
    found = rankfold.evaluate_text(folder, file, **asked, dtype="bfloat16", device="meta")
    network, tokenizer = load_model(folder, dtype="bfloat16", device="cpu"), load_tokenizer(folder)
    text = "\n\n".join(row["body"] for row in ROWS)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0, :48].view(3, 16)
    assert found["perplexity"] == pytest.approx(perplexity(network, ids)["perplexity"], rel=1e-6)
    assert found["model"] == str(folder) and loaded == [(str(folder), "bfloat16", "meta")]
    rankfold.evaluate_text(folder, file, **asked)
    assert loaded[1:] == [(str(folder), "auto", "auto")]


def test_it_writes_what_the_model_in_memory_writes(folder, loaded):
    given = {"max_new_tokens": 5, "temperature": 1.0, "seed": 3}
    text = generation.generate_text(folder, "a class", dtype="bfloat16", device="meta", **given)
    network = load_model(folder, dtype="bfloat16", device="cpu")
    assert text == generation.continue_text(network, load_tokenizer(folder), "a class", **given)
    generation.generate_text(folder, "a class", max_new_tokens=1)
    assert loaded == [(str(folder), "bfloat16", "meta"), (str(folder), "auto", "auto")]


def test_as_many_tokens_are_written_as_the_page_says(folder, loaded, monkeypatch):
    def written(*_, max_new_tokens, **__):
        return torch.full((1, max_new_tokens), 5)

    monkeypatch.setattr(generation, "generate_ids", written)
    monkeypatch.setattr(generation, "text_after", lambda tokenizer, ids, tokens: len(tokens))
    assert generation.generate_text(folder, "a class") == 64


def test_an_encoder_that_writes_nothing_is_named(tmp_path, folder):
    tiny_encoder("bert").save_pretrained(tmp_path / "reads")
    with pytest.raises(UnsupportedModelError, match=str(tmp_path / "reads")):
        generation.generate_text(tmp_path / "reads", "a class")


def test_the_baseline_is_loaded_as_the_model_is(folder, loaded, tmp_path):
    evaluating.evaluate(folder, writing=Writing(limit=1, baseline=str(folder)), dtype="bfloat16", device="meta")
    assert loaded == [(str(folder), "bfloat16", "meta")] * 2
