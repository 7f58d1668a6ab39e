"""A model of images and text on the command line, in this process: from a file of examples to a checkpoint."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers as t

import rankfold
from families import tiny_model as tiny_text_model
from tiny_pairs import picture, save_llava, tiny_model, write_pairs


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """LLaVA with its processor and another without, a model of text, and examples."""
    folder = tmp_path_factory.mktemp("pairs")
    save_llava(folder / "llava")
    tiny_model("llava").save_pretrained(folder / "bare")
    tiny_text_model("llama").save_pretrained(folder / "llama")
    write_pairs(folder, 20)
    (folder / "gone.jsonl").write_text('{"text": "what?", "image": "gone.png"}\n' * 2)
    (folder / "text.txt").write_text("some text " * 100)
    return folder


CALIBRATION = "--calibration pairs.jsonl --num-samples 16 --device cpu"


def test_from_examples_to_a_checkpoint_that_sees(run, place):
    code, _, err = run(f"compress llava -o small --sparsity 0.3 --rank-multiple 2 {CALIBRATION}")
    assert code == 0, err
    record = json.loads((place / "small" / "rankfold.json").read_text())
    facts, held_out = record["calibration"], record["held_out"]
    assert facts["kind"] == "image-text examples" and (facts["num_samples"], facts["held_out"]) == (16, 2)
    assert held_out["windows"] == 2 and held_out["perplexity"] > 1 and held_out["perplexity_dense"] > 1
    card = (place / "small" / "README.md").read_text()
    assert f"16 image-text examples of {facts['tokens']} tokens of `pairs.jsonl`" in card
    assert "on 2 held-out calibration samples |" in card
    assert "processor = AutoProcessor.from_pretrained" in card
    processor = t.AutoProcessor.from_pretrained(place / "small")
    model = t.AutoModelForImageTextToText.from_pretrained(place / "small").eval()
    turns = [{"role": "user", "content": [{"type": "image", "image": picture(3)}, {"type": "text", "text": "who?"}]}]
    inputs = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=3, do_sample=False, eos_token_id=None).shape[1] > 3
    assert model.num_parameters() < tiny_model("llava").num_parameters()


def test_moments_once_then_compress(run, place):
    """What was held out comes back out of the folder, images and all."""
    code, _, err = run(f"calibrate llava -o moments {CALIBRATION}")
    assert code == 0, err
    method = "--method modegpt --sparsity 0.3 --rank-multiple 2"
    code, _, err = run(f"compress llava -o later --moments moments {method} --device cpu")
    assert code == 0, err
    code, _, err = run(f"compress llava -o at-once --mode one-pass {method} {CALIBRATION}")
    assert code == 0, err
    later, once = (json.loads((place / f / "rankfold.json").read_text())["held_out"] for f in ("later", "at-once"))
    assert later == once
    small, same = (rankfold.load(place / f, device="cpu").state_dict() for f in ("later", "at-once"))
    assert all(torch.equal(tensor, same[name]) for name, tensor in small.items())


def test_the_commands_of_the_page(run, place):
    """Of docs/vision.md, with fewer examples; its questions are in test_with_pictures."""
    page = (Path(__file__).parents[2] / "docs" / "vision.md").read_text(encoding="utf-8")
    lines = re.findall(r"^rankfold (?:models|compress) .*$", page, re.M)
    assert len(lines) == 4
    for line in lines:
        line = line.partition("#")[0].removeprefix("rankfold ").replace("MODEL", "llava").replace("-o small", "-o page")
        line = line.replace("language=wikitext2", "language=text.txt --max-length 16")
        few = "--num-samples 16 --rank-multiple 2 --device cpu" if line.startswith("compress") else ""
        code, _, err = run(f"{line} {few}")
        assert code in (0, None), f"{line}: {err}"


def test_the_python_of_the_page(place, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "vision.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    code = code.replace("MODEL", "llava").replace('"small"', '"by-python"')
    code = code.replace("sparsity=", "rank_multiple=2, sparsity=")
    code = re.sub(r'("pairs.jsonl", \w+)', r"\1, num_samples=16", code)
    monkeypatch.chdir(place)
    exec(compile(code, "vision.md", "exec"), {})
    record = json.loads((place / "by-python" / "rankfold.json").read_text())
    assert [part["options"]["sparsity"] for part in (record["before"], record)] == [0.2, 0.3]


def test_a_plan(run, place):
    code, out, err = run(f"plan llava --sparsity 0.3 --rank-multiple 2 --method modegpt {CALIBRATION} --json")
    assert code == 0, err
    facts = json.loads(out)["calibration"]
    assert facts["kind"] == "image-text examples" and facts["tokens"] // 16 <= facts["max_length"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("llama --calibration pairs.jsonl", "takes no images with its text, and pairs.jsonl has an image column"),
        (
            "bare --calibration pairs.jsonl",
            "put the model's own preprocessor_config.json and processor_config.json beside",
        ),
        ("llava --calibration gone.jsonl", "line 1: its image 'gone.png' is missing; put it there, or remove the row"),
        (
            "llava --calibration pairs.jsonl --calibration text.txt",
            "only one file of image-text examples can be given, got",
        ),
    ],
)
def test_errors_are_one_line(line, message, run):
    code, _, err = run(f"compress {line} -o never --sparsity 0.3 --device cpu")
    assert code == 2 and message in err.replace("\n", " ") and err.count("\n") == 1, err
