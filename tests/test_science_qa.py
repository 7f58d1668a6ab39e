"""The model that learns to see, and the table of it: its rows, what it is trained on, and the whole script in small."""

import importlib
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers as tk
import torch
import transformers as t
from PIL import Image

from families import GQA
from rankfold.evaluation.science_qa import choice_of, prompt_of

SCRIPTS = Path(__file__).resolve().parents[1] / "benchmarks"
NAMES = ("pictures", "picture_rows", "seeing_model", "science_qa")
TINY = {"tower": {"steps": 1, "pictures": 2}, "language": {"steps": 1, "questions": 2, "from_block": 1}}


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield {name: importlib.import_module(name) for name in NAMES}


@pytest.fixture(scope="module")
def tokenizer(scripts):
    """Bytes, and the words of the questions with the spaces before them, as SmolLM2 has them."""
    marks = ["<|endoftext|>", "<|im_start|>", scripts["seeing_model"].END, scripts["seeing_model"].IMAGE]
    draw, rows = random.Random(0), scripts["picture_rows"].rows
    texts = [f" {prompt_of(row)} {' '.join(row['choices'])}" for _ in range(60) for row, _ in rows(draw, test=False)]
    bytes_ = tk.Tokenizer(tk.models.BPE())
    bytes_.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = tk.decoders.ByteLevel()
    alphabet = tk.pre_tokenizers.ByteLevel.alphabet()
    bytes_.train_from_iterator(
        texts, tk.trainers.BpeTrainer(vocab_size=700, special_tokens=marks, initial_alphabet=alphabet)
    )
    return t.PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token=marks[2], pad_token=marks[2])


@pytest.mark.parametrize("test", [True, False])
def test_rows_have_the_form_of_science_qa(scripts, test):
    rows, pictures = scripts["picture_rows"], scripts["pictures"]
    found = rows.rows_of_all_kinds(random.Random(1), test, 20)
    assert [row["kind"] for row, _ in found] == list(rows.SUBJECTS) * 20
    for row, image in found:
        assert len(set(row["choices"])) == len(row["choices"]) <= rows.MOST and row["subject"].endswith("science")
        assert row["grade"] == f"grade{3 * (len(row['choices']) - 1)}"
        assert (image is None) == (row["kind"] in ("text", "word")) and bool(row["hint"]) == (row["kind"] == "text")
        if row["kind"] == "word":
            name = row["question"].removesuffix("?").split()[-1]
            [right] = [word for word in row["choices"] if word in rows.GROUPS[name]]
            assert right == row["choices"][row["answer"]]
            assert pictures.in_test(" ".join(sorted(row["choices"]))) == test
        if row["kind"] == "text":
            assert row["choices"][row["answer"]] in row["hint"].split() and pictures.in_test(row["hint"]) == test
    places = [row["answer"] for row, _ in found if len(row["choices"]) == 2]
    assert 0.3 < sum(places) / len(places) < 0.7


def test_it_is_trained_on_what_its_processor_makes(scripts, tokenizer, subtests):
    """Tokens, pixels and which tokens are learnt, of a picture, a text and a word."""
    model, asked = scripts["seeing_model"], scripts["picture_rows"].rows_of_all_kinds(random.Random(2), False, 1)
    processor = model.processor(tokenizer)
    for row, image in asked:
        with subtests.test(row["kind"]):
            shown = [] if image is None else [{"type": "image", "image": Image.fromarray(image)}]
            turns = [{"role": "user", "content": [*shown, {"type": "text", "text": prompt_of(row)}]}]
            options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
            question = processor.apply_chat_template(turns, add_generation_prompt=True, **options)["input_ids"]
            answer = {"role": "assistant", "content": [{"type": "text", "text": model.answer_of(row)}]}
            made = processor.apply_chat_template([*turns, answer], **options)
            inputs, labels = model.batch([(row, image)], tokenizer)
            begin, end = question.shape[1], made["input_ids"].shape[1]
            assert torch.equal(inputs["input_ids"][:, :end], made["input_ids"])
            assert torch.equal(made["input_ids"][:, :begin], question)
            assert torch.equal(labels[:, begin:end], made["input_ids"][:, begin:])
            assert (labels[:, :begin] == -100).all() and (labels[:, end:] == -100).all()
            assert choice_of(tokenizer.decode(labels[0, begin : end - 1]), len(row["choices"])) == row["answer"]
            if image is not None:
                torch.testing.assert_close(inputs["pixel_values"], made["pixel_values"])


def test_the_script_in_small(scripts, tokenizer, tmp_path, monkeypatch):
    """Everything from training to the table, of a tiny language model; a second call has nothing left to do."""
    model, script = scripts["seeing_model"], scripts["science_qa"]
    for part, change in TINY.items():
        monkeypatch.setitem(model.TRAINING, part, model.TRAINING[part] | change)
    monkeypatch.setattr(script, "EXAMPLES", 14)
    language = t.LlamaForCausalLM(t.LlamaConfig(**GQA | {"vocab_size": 720, "max_position_embeddings": 512}))
    language.save_pretrained(tmp_path / "language")
    tokenizer.save_pretrained(tmp_path / "language")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "wikitext2-test.tokens").write_text("What shape is red? " * 600)
    work, out = tmp_path / "work", tmp_path / "out.json"
    command = f"science_qa.py --model {tmp_path}/language --data {tmp_path} --work {work} --json {out} --questions 2"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--only", "modegpt", "--sparsity", "0.3"])
    script.main()
    record = json.loads(out.read_text())
    names = [f"{case}: modegpt 0.3" for case in script.CASES]
    assert [row["name"] for row in record["rows"]] == [*script.SHOWN, *names]
    dense, *_, alone, tower, both = (row["parameters"] for row in record["rows"])
    assert dense - alone > 0 and dense - tower > 0 and dense - both == (dense - alone) + (dense - tower)
    assert all(row["columns"]["IMG"]["samples"] == 10 and row["samples"] == 14 for row in record["rows"])
    trained, start = (t.AutoModelForImageTextToText.from_pretrained(work / "model"), language.model)
    [first, second, *_] = trained.model.language_model.layers
    assert torch.equal(first.mlp.up_proj.weight, start.layers[0].mlp.up_proj.weight)
    assert not torch.equal(second.mlp.up_proj.weight, start.layers[1].mlp.up_proj.weight)
    shown = {name: np.asarray(Image.open(work / name / "images" / "0.png")) for name in script.SHOWN.values()}
    assert not np.array_equal(shown["own"], shown["other"]) and not np.array_equal(shown["own"], shown["noise"])
    page = "\n".join(importlib.import_module("pages.models").science_qa(record))
    assert "### Compressed: language and vision" in page and "| NAT | SOC | LAN | TXT | IMG | NO |" in page
    script.main()
    assert json.loads(out.read_text())["rows"] == record["rows"]
