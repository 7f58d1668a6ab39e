"""Images for calibration: read, drawn, made into pixels by the model's own processor."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import transformers
from PIL import Image

import rankfold
from rankfold import Images
from rankfold.errors import CheckpointError, DataError, OptionError
from tiny_encoders import opened_encoder


def picture(number: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (20 + number, 24, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twenty images, some of them in a folder of their own, and a note."""
    place = tmp_path_factory.mktemp("pictures")
    (place / "more").mkdir()
    for number in range(20):
        picture(number).save((place / "more" if number % 3 else place) / f"{number:02d}.png")
    (place / "notes.txt").write_text("no image")
    return place


@pytest.fixture(scope="module")
def processor():
    return transformers.ViTImageProcessorPil(size={"height": 28, "width": 28})


def of_all(processor) -> list[torch.Tensor]:
    return [processor(images=[picture(n)], return_tensors="pt")["pixel_values"][0] for n in range(20)]


def rows(pixels: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in pixels}


def test_a_folder_is_searched_and_split(folder, processor):
    source = opened_encoder("vit-head")
    found = rankfold.load_images(folder, source, samples=16, processor=processor)
    assert found.ids.shape == (16, 3, 28, 28) and len(found.held_out) == 2
    everything = rows(torch.stack(of_all(processor)))
    assert rows(found.ids) | rows(found.held_out) <= everything and not rows(found.ids) & rows(found.held_out)
    again, other = (rankfold.load_images(folder, source, samples=16, seed=s, processor=processor) for s in (0, 1))
    assert again.sha256 == found.sha256 != other.sha256
    assert found.describe() | {"sha256": "", "held_out_sha256": "", "origin": ""} == {
        "source": folder.name,
        "origin": "",
        "draw": "images of the whole folder",
        "samples": 16,
        "length": 16,  # patches of 7 x 7 in 28 x 28
        "tokens": 256,
        "seed": 0,
        "sha256": "",
        "held_out": 2,
        "held_out_sha256": "",
        "samples_wanted": 16,
        "kind": "images",
    }


def test_a_file_of_examples_gives_its_images(folder, processor, tmp_path):
    """Each once, by paths from where the file is; rows may name several or none."""
    first, second = (str(path) for path in sorted(folder.rglob("*.png"))[:2])
    (tmp_path / "here.png").write_bytes((folder / "more" / "19.png").read_bytes())
    lines = [
        {"text": "a", "image": first},
        {"text": "b", "image": [second, first]},
        {"text": "c"},
        {"image": "here.png"},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    source = opened_encoder("vit-head")
    found = rankfold.load_images(file, source, processor=processor)
    named = [Image.open(path) for path in (first, second, tmp_path / "here.png")]
    expected = processor(images=[image.convert("RGB") for image in named], return_tensors="pt")["pixel_values"]
    assert len(found.ids) + len(found.held_out) == 3 and rows(torch.cat([found.ids, found.held_out])) == rows(expected)
    for bad, message in (
        ('{"image": 3}', r"line 1: column 'image' must hold a path"),
        ('{"text": "a"}', "names no images"),
    ):
        file.write_text(bad)
        with pytest.raises(DataError, match=message):
            rankfold.load_images(file, source, processor=processor)
    with pytest.raises(DataError, match="no images at"):
        rankfold.load_images(tmp_path / "none.jsonl", source, processor=processor)


def test_too_few_images_are_shared_out(folder, processor):
    found = rankfold.load_images(folder, opened_encoder("vit-head"), samples=64, processor=processor)
    assert (len(found.ids), len(found.held_out)) == (18, 2) and found.describe()["samples_wanted"] == 64


@pytest.mark.parametrize("kind", ["struct", "bytes"])
def test_a_parquet_file_gives_the_same_pixels(kind, folder, processor, tmp_path):
    encoded = []
    for number in range(20):
        buffer = io.BytesIO()
        picture(number).save(buffer, "png")
        encoded.append({"bytes": buffer.getvalue(), "path": None} if kind == "struct" else buffer.getvalue())
    pa.parquet.write_table(pa.table({"image": encoded, "label": list(range(20))}), tmp_path / "rows.parquet")
    source = opened_encoder("vit-head")
    found = rankfold.load_images(tmp_path / "rows.parquet", source, samples=20, processor=processor)
    everything = rows(torch.stack(of_all(processor)))
    assert rows(found.ids) | rows(found.held_out) == everything
    with pytest.raises(DataError, match="column 'label' holds no encoded image"):
        rankfold.load_images(tmp_path / "rows.parquet", source, field="label", processor=processor)
    with pytest.raises(DataError, match="has no column 'photo'; it has: image, label"):
        rankfold.load_images(tmp_path / "rows.parquet", source, field="photo", processor=processor)


def test_what_cannot_be_read_is_named(folder, processor, tmp_path):
    source = opened_encoder("vit-head")
    with pytest.raises(
        DataError, match="no images at .*nowhere.*: expected a folder of images, or a .parquet or .jsonl file"
    ):
        rankfold.load_images(tmp_path / "nowhere", source, processor=processor)
    with pytest.raises(DataError, match="no images at .*nowhere.parquet.*: expected a folder of images, or a .parquet"):
        rankfold.load_images(tmp_path / "nowhere.parquet", source, processor=processor)
    with pytest.raises(DataError, match="holds no images; expected files that end in .bmp"):
        rankfold.load_images(tmp_path, source, processor=processor)
    (tmp_path / "broken.png").write_bytes((folder / "00.png").read_bytes()[:60])
    with pytest.raises(DataError, match=r"broken\.png is not a readable image .*replace or remove it"):
        rankfold.load_images(tmp_path, source, processor=processor)
    with pytest.raises(CheckpointError, match="came without an image processor; pass one, or pixels"):
        rankfold.load_images(folder, source)
    with pytest.raises(OptionError, match="samples must be >= 1, got 0"):
        rankfold.load_images(folder, source, samples=0)


def test_pixels_that_are_none(processor):
    good = torch.zeros(2, 3, 28, 28)
    with pytest.raises(
        DataError, match=r"ids must be a tensor \(images, channels, height, width\) of floats, got \[2, 3\]"
    ):
        Images(torch.zeros(2, 3), "x", "x", 0)
    with pytest.raises(DataError, match="held_out holds NaN or infinite pixels"):
        Images(good, "x", "x", 0, good * float("nan"))


def test_images_and_texts_are_not_taken_for_each_other():
    small = Images(torch.zeros(2, 3, 14, 14), "x", "x", 0)
    with pytest.raises(DataError, match=r"the vision part of .* takes images of \[3, 28, 28\].*, got \[3, 14, 14\]"):
        rankfold.calibrate(opened_encoder("vit-head"), small)
    with pytest.raises(DataError, match="the language part of .* takes token ids, got images; calibrate on text"):
        rankfold.calibrate(opened_encoder("bert"), small)
    with pytest.raises(OptionError, match="the vision part of .* takes images; use load_images"):
        rankfold.load_tokens("pydoc", opened_encoder("clip-vision"))
