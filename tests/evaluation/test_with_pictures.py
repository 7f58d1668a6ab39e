"""ScienceQA asked with its pictures: the prompt, how an answer is read, and that questions meet their own pictures."""

import json
from pathlib import Path

import datasets
import pytest
import torch
from PIL import Image
from transformers import GenerationConfig

from rankfold.errors import DataError, OptionError
from rankfold.evaluation import evaluate as evaluation
from rankfold.evaluation.evaluate import evaluate
from rankfold.evaluation.science_qa import choice_of, prompt_of
from rankfold.evaluation.tasks import Questions
from rankfold.evaluation.with_pictures import WRITTEN, _answers, ask, prepared, rows_of_file
from tiny_pairs import FAMILIES, picture, tiny_model

BASE = {"hint": "", "subject": "natural science", "grade": "grade3"}


def test_the_prompt_is_llavas():
    row = {"question": "What is it?", "choices": ["a cat", "a dog"], "hint": ""}
    assert prompt_of(row) == (
        "Context: N/A\nQuestion: What is it?\nOptions: (A) a cat (B) a dog\n"
        "Answer with the option's letter from the given choices directly."
    )
    assert prompt_of(row | {"hint": "Look."}).startswith("Context: Look.\nQuestion: ")


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("B", 1),
        (" C\n", 2),
        ("B. a dog", 1),
        ("A\nbecause", 0),
        ("It barks. The answer is B.", 1),
        ("The answer is C", 2),
        ("D", None),  # of three choices
        ("The answer is E.", None),
        ("b", None),
        ("(B)", None),
        ("Because", None),
        ("", None),
    ],
)
def test_an_answer_is_read_as_by_llavas_script(text, index):
    assert choice_of(text, 3) == index


class Brightness(torch.nn.Module):
    """Answers A to a dark picture, B to a bright one, and C to none."""

    device, dtype, generation_config = torch.device("cpu"), torch.float32, GenerationConfig()

    def __init__(self, tokenizer, config):
        super().__init__()
        self.tokenizer, self.config = tokenizer, config

    def generate(self, input_ids, pixel_values=None, **_):
        bright = [] if pixel_values is None else (pixel_values.flatten(1).mean(1) > 0).tolist()
        letters = ["B" if one else "A" for one in bright] or ["C"] * len(input_ids)
        ids = torch.tensor([self.tokenizer.convert_tokens_to_ids([letter, "</s>"]) for letter in letters])
        return torch.cat([input_ids, ids], dim=1)


def write(folder, rows: list[dict]):
    file = folder / "scienceqa.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_each_question_is_answered_by_its_picture(tmp_path):
    """In groups of one length that are not those of the file; by column, every answer is known beforehand."""
    colours = {"dark.png": 10, "bright.png": 240}
    for name, value in colours.items():
        Image.new("RGB", (28, 28), (value,) * 3).save(tmp_path / name)
    rows = []
    for i in range(23):
        image = ("dark.png", "bright.png", None)[i % 3]
        answer = (i % 3 + (i % 5 == 0)) % 3  # one in five expects another answer
        question = f"{'so ' * (i % 4)}what?"
        rows.append(BASE | {"question": question, "choices": ["x", "y", "z"], "answer": answer, "image": image})
    processor = FAMILIES["llava"].processor()
    network = Brightness(processor.tokenizer, FAMILIES["llava"].config())
    found = ask(network, processor, write(tmp_path, rows), batch_size=4)
    wrong = [row for i, row in enumerate(rows) if i % 5 == 0]
    assert found["acc"] == pytest.approx(1 - len(wrong) / 23) and found["answered"] == 1.0 and found["samples"] == 23
    seen = [row for row in rows if row["image"]]
    assert found["columns"]["IMG"]["samples"] == len(seen)
    right = sum(row not in wrong for row in seen) / len(seen)
    assert found["columns"]["IMG"]["acc"] == pytest.approx(right) and right != found["columns"]["NO"]["acc"]
    two = [row | {"choices": ["x", "y"], "answer": 0} for row in rows if not row["image"]]
    found = ask(network, processor, write(tmp_path, two))
    assert found["acc"] == found["answered"] == 0.0  # it names a third choice of two
    assert ask(network, processor, write(tmp_path, rows), limit=4)["samples"] == 4
    with pytest.raises(DataError, match="row 1|line 1.* has 6 choices; a model answers by one of ABCDE"):
        ask(network, processor, write(tmp_path, [rows[0] | {"choices": list("uvwxyz")}]))


@pytest.mark.parametrize("family", ["llava", "idefics3", "gemma3"])
def test_it_writes_what_the_stock_model_writes_to_one_question(family, tmp_path):
    rows = []
    for i in range(4):
        name = f"{i}.png" if i % 3 else None
        if name:
            picture(i).save(tmp_path / name)
        rows.append(BASE | {"question": "what?", "choices": ["x", "y"], "answer": 0, "image": name})
    processor, model = FAMILIES[family].processor(), tiny_model(family)
    asked = list(prepared(rows_of_file(write(tmp_path, rows)), processor, model.config.image_token_id))
    for i in (1, 2):
        inputs = asked[i].inputs
        expected = model.generate(**inputs, max_new_tokens=WRITTEN, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        text = processor.tokenizer.decode(expected, skip_special_tokens=True)
        [answer] = _answers(model, processor.tokenizer, [asked[i]])
        assert answer.strip() == text.strip() and len(expected) == WRITTEN


def test_rows_of_the_hub_bring_their_pictures(tmp_path, monkeypatch):
    rows, asked = [], []
    for i, value in enumerate((10, 240, None)):
        if value is not None:
            Image.new("RGB", (28, 28), (value,) * 3).save(tmp_path / f"{i}.png")
        image = None if value is None else str(tmp_path / f"{i}.png")
        rows.append(BASE | {"question": f"{i}?", "choices": ["x", "y", "z"], "answer": i, "image": image})
    write(tmp_path, rows)
    inside = [row["image"] and {"bytes": Path(row["image"]).read_bytes(), "path": None} for row in rows]
    held = datasets.Dataset.from_list([row | {"image": image} for row, image in zip(rows, inside, strict=True)])
    held = held.cast_column("image", datasets.Image())
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: asked.append((name, split)) or held)
    processor = FAMILIES["llava"].processor()
    network = Brightness(processor.tokenizer, FAMILIES["llava"].config())
    assert ask(network, processor, None) == ask(network, processor, tmp_path / "scienceqa.jsonl")
    assert ask(network, processor, None)["acc"] == 1.0 and asked[0] == ("derek-thomas/ScienceQA", "test")


def test_a_model_that_takes_pictures_is_asked_with_them(tmp_path, monkeypatch):
    """From a folder, by the command's own function; with examples there is no way to show their pictures."""
    processor, model = FAMILIES["llava"].processor(), tiny_model("llava")
    processor.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    picture(1).save(tmp_path / "1.png")
    rows = [BASE | {"question": "what?", "choices": ["x", "y"], "answer": 1, "image": "1.png"}] * 2
    write(tmp_path, rows)
    result = evaluate(tmp_path / "model", questions=Questions(["scienceqa"], str(tmp_path)), device="cpu")
    found = result["tasks"]["scienceqa"]
    assert found["columns"]["IMG"]["samples"] == 2 and 0.0 <= found["answered"] <= 1.0
    few = evaluate(tmp_path / "model", questions=Questions(["scienceqa"], str(tmp_path), limit=1), device="cpu")
    assert few["tasks"]["scienceqa"]["columns"]["IMG"]["samples"] == 1
    monkeypatch.setattr(evaluation, "load_processor", lambda model: processor)
    write(tmp_path, rows).with_name("scienceqa_train.jsonl").write_text(json.dumps(rows[0]))
    with pytest.raises(OptionError, match="is asked scienceqa without examples; leave out num_fewshot"):
        evaluate(tmp_path / "model", questions=Questions(["scienceqa"], str(tmp_path), num_fewshot=1), device="cpu")
