"""Encoders on the command line, in this process: a vision transformer and a folder of images."""

import json
import re

import numpy as np
import pytest
import torch
import transformers as t
from PIL import Image

import rankfold
from tiny_encoders import samples_of, tiny_encoder
from versions import needs_image_processors


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A ViT with its processor and another without, and images."""
    needs_image_processors()
    folder = tmp_path_factory.mktemp("encoders")
    for name in ("vit", "bare"):
        tiny_encoder("vit-head").save_pretrained(folder / name)
    t.ViTImageProcessorPil(size={"height": 28, "width": 28}).save_pretrained(folder / "vit")
    tiny_encoder("clip-vision").save_pretrained(folder / "clip")
    (folder / "images").mkdir()
    for number in range(20):
        pixels = np.random.default_rng(number).integers(0, 256, (30, 28, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
    (folder / "broken").mkdir()
    (folder / "broken" / "0.png").write_text("no image")
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text("some text " * 100)
    return folder


CALIBRATION = "--calibration images --num-samples 16 --device cpu"


def test_a_vision_transformer_from_images_to_a_checkpoint(run, place):
    code, out, err = run(f"compress vit -o small --sparsity 0.3 --rank-multiple 2 {CALIBRATION}")
    assert code == 0, err
    assert (
        "30." in out
        and re.search(r"cosine of the last states +1 +0\.", out)
        and "on 2 held-out calibration samples" in out
    )
    before, after = (json.loads((place / f / "preprocessor_config.json").read_text()) for f in ("vit", "small"))
    assert before == after
    model = t.AutoModelForImageClassification.from_pretrained(place / "small")
    pixels = t.AutoImageProcessor.from_pretrained(place / "small")(images=Image.open(place / "images" / "0.png"))
    assert torch.isfinite(model(torch.tensor(np.array(pixels["pixel_values"]))).logits).all()
    card = (place / "small" / "README.md").read_text()
    assert (
        "import AutoModelForImageClassification, AutoImageProcessor" in card and "16 x 16 patches of `images`" in card
    )
    code, out, _ = run("inspect small")
    assert code == 0 and re.search(r"cosine of the last states +1 +0\.", out)
    for command in ("evaluate small --text text.txt", "generate small hello", "export small -o x"):
        code, _, err = run(command)
        assert code == 2 and "is an encoder (vit) and predicts no next token" in err and err.count("\n") == 1, command


def test_a_plan_and_moments(run, place):
    code, out, err = run(f"plan vit --sparsity 0.3 --rank-multiple 2 --method modegpt {CALIBRATION} --json")
    assert code == 0, err
    assert json.loads(out)["kv_bytes_per_token"] == 0 and json.loads(out)["calibration"]["kind"] == "images"
    assert run(f"calibrate vit -o moments {CALIBRATION}")[0] == 0
    code, _, err = run(
        "compress vit -o from --moments moments --method modegpt --sparsity 0.3 --rank-multiple 2 --device cpu"
    )
    assert code == 0, err


def test_models_says_what_a_part_is(run):
    code, out, _ = run("models clip --component vision --json")
    assert code == 0 and json.loads(out)["model_type"] == "clip_vision_model" and json.loads(out)["qk"] == "svd"


def test_what_surrounds_a_sentence_encoder_stays_byte_for_byte(tmp_path):
    tiny_encoder("bert").save_pretrained(tmp_path / "dense")
    written = {"modules.json": "[]", "sentence_bert_config.json": "{}", "1_Pooling/config.json": '{"pooling": "mean"}'}
    (tmp_path / "dense" / "1_Pooling").mkdir()
    for name, text in written.items():
        (tmp_path / "dense" / name).write_text(text)
    (tmp_path / "dense" / "1_Pooling" / "notes.txt").write_text("not taken")
    source = rankfold.open_model(tmp_path / "dense", device="cpu")
    rankfold.compress(
        source,
        method=rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2),
        calibration=samples_of(source),
        output=tmp_path / "small",
    )
    assert {name: (tmp_path / "small" / name).read_text() for name in written} == written
    assert [path.name for path in (tmp_path / "small" / "1_Pooling").iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    "line, said",
    [
        ("compress vit -o x --calibration nowhere", "no images at 'nowhere': expected a folder of images"),
        ("compress vit -o x", "no images at 'mixture'"),
        ("compress vit -o x --calibration empty", "empty holds no images"),
        ("compress vit -o x --calibration broken", "broken/0.png is not a readable image"),
        ("compress bare -o x --calibration images", "no image processor can be read from"),
        (
            "compress vit -o x --calibration images --component language",
            "has the component vision, got language; name none",
        ),
        (
            "compress clip -o x --calibration images",
            "has the components language and vision, got none; choose one with --component",
        ),
        (
            "compress vit -o x --calibration images --calibration broken",
            "only one folder or file of images can be given, got",
        ),
        ("compress vit -o x --calibration images --method obd", "vit predicts no next token; take another method"),
        ("compare vit -o x --methods svd --sparsities 0.3 --text text.txt", "vit is an encoder (vit)"),
    ],
)
def test_what_cannot_be_done_ends_in_one_line(run, place, line, said):
    code, _, err = run(f"{line} --device cpu --sparsity 0.3" if "compare" not in line else f"{line} --device cpu")
    last = err.strip().splitlines()[-1]
    assert code == 2 and said in last and not (place / "x").exists(), err
