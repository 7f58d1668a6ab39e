"""Images for calibration: read, drawn, made into pixels by the model's own processor."""

import io
import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import transformers
from PIL import Image

import rankfold
from rankfold import CalibrationData
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
    found = rankfold.load_calibration(folder, source, num_samples=16, tokenizer=processor)
    assert found.ids.shape == (16, 3, 28, 28) and len(found.held_out) == 2
    everything = rows(torch.stack(of_all(processor)))
    assert rows(found.ids) | rows(found.held_out) <= everything and not rows(found.ids) & rows(found.held_out)
    again, other = (
        rankfold.load_calibration(folder, source, num_samples=16, seed=s, tokenizer=processor) for s in (0, 1)
    )
    assert again.sha256 == found.sha256 != other.sha256
    assert found.describe() | {"sha256": "", "held_out_sha256": "", "origin": ""} == {
        "source": folder.name,
        "origin": "",
        "draw": "images of the whole folder",
        "num_samples": 16,
        "max_length": 16,  # patches of 7 x 7 in 28 x 28
        "tokens": 256,
        "seed": 0,
        "sha256": "",
        "held_out": 2,
        "held_out_sha256": "",
        "num_samples_wanted": 16,
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
    found = rankfold.load_calibration(file, source, tokenizer=processor)
    named = [Image.open(path) for path in (first, second, tmp_path / "here.png")]
    expected = processor(images=[image.convert("RGB") for image in named], return_tensors="pt")["pixel_values"]
    assert len(found.ids) + len(found.held_out) == 3 and rows(torch.cat([found.ids, found.held_out])) == rows(expected)
    for bad, message in (
        ('{"image": 3}', r"line 1: column 'image' must hold a path"),
        ('{"text": "a"}', "names no images"),
    ):
        file.write_text(bad)
        with pytest.raises(DataError, match=message):
            rankfold.load_calibration(file, source, tokenizer=processor)
    with pytest.raises(DataError, match="no images at"):
        rankfold.load_calibration(tmp_path / "none.jsonl", source, tokenizer=processor)


def test_of_an_image_that_is_cut_a_piece_is_taken(folder):
    """As LLaVA-NeXT's, Idefics 3's and SmolVLM's processors do: its tower sees the pieces."""
    cuts = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size=28, image_grid_pinpoints=[[28, 56], [56, 28]]
    )
    found = rankfold.load_calibration(folder, opened_encoder("vit-head"), num_samples=16, tokenizer=cuts)
    assert found.ids.shape == (16, 3, 28, 28) and len(found.held_out) == 2
    pieces = [cuts(images=[picture(n)], return_tensors="pt")["pixel_values"][0] for n in range(20)]
    owners = [{n for n, of_it in enumerate(pieces) if rows(x[None]) <= rows(of_it)} for x in found.ids]
    assert len(set.union(*owners)) == 16
    places = [
        next(i for i, piece in enumerate(pieces[min(n)]) if torch.equal(piece, x))
        for n, x in zip(owners, found.ids, strict=True)
    ]
    assert set(places) == {0, 1, 2}


def test_images_of_several_sizes_are_refused(folder):
    keeps = transformers.ViTImageProcessorPil(do_resize=False)
    with pytest.raises(
        DataError, match=r"makes images of 18 sizes of these, as \(3, 2\d, 24\) and \(3, 3\d, 24\); give"
    ):
        rankfold.load_calibration(folder, opened_encoder("vit-head"), num_samples=16, tokenizer=keeps)


def test_too_few_images_are_shared_out(folder, processor, caplog):
    with caplog.at_level(logging.INFO):
        found = rankfold.load_calibration(folder, opened_encoder("vit-head"), num_samples=64, tokenizer=processor)
    assert "has 20 images, not 72" in caplog.text
    assert (len(found.ids), len(found.held_out)) == (18, 2) and found.describe()["num_samples_wanted"] == 64


@pytest.mark.parametrize("kind", ["struct", "bytes"])
def test_a_parquet_file_gives_the_same_pixels(kind, folder, processor, tmp_path):
    encoded = []
    for number in range(20):
        buffer = io.BytesIO()
        picture(number).save(buffer, "png")
        encoded.append({"bytes": buffer.getvalue(), "path": None} if kind == "struct" else buffer.getvalue())
    pa.parquet.write_table(pa.table({"image": encoded, "label": list(range(20))}), tmp_path / "rows.parquet")
    source = opened_encoder("vit-head")
    found = rankfold.load_calibration(tmp_path / "rows.parquet", source, num_samples=20, tokenizer=processor)
    everything = rows(torch.stack(of_all(processor)))
    assert rows(found.ids) | rows(found.held_out) == everything
    with pytest.raises(DataError, match="column 'label' holds no encoded image"):
        rankfold.load_calibration(tmp_path / "rows.parquet", source, text_column="label", tokenizer=processor)
    with pytest.raises(DataError, match="has no column 'photo'; it has: image, label"):
        rankfold.load_calibration(tmp_path / "rows.parquet", source, text_column="photo", tokenizer=processor)


def test_what_cannot_be_read_is_named(folder, processor, tmp_path):
    source = opened_encoder("vit-head")
    with pytest.raises(
        DataError, match="no images at .*nowhere.*: expected a folder of images, or a .parquet or .jsonl file"
    ):
        rankfold.load_calibration(tmp_path / "nowhere", source, tokenizer=processor)
    with pytest.raises(DataError, match="no images at .*nowhere.parquet.*: expected a folder of images, or a .parquet"):
        rankfold.load_calibration(tmp_path / "nowhere.parquet", source, tokenizer=processor)
    with pytest.raises(DataError, match="holds no images; expected files that end in .bmp"):
        rankfold.load_calibration(tmp_path, source, tokenizer=processor)
    (tmp_path / "broken.png").write_bytes((folder / "00.png").read_bytes()[:60])
    with pytest.raises(DataError, match=r"broken\.png is not a readable image .*replace or remove it"):
        rankfold.load_calibration(tmp_path, source, tokenizer=processor)
    with pytest.raises(CheckpointError, match="came without an image processor; pass one as tokenizer, or pixels"):
        rankfold.load_calibration(folder, source)
    with pytest.raises(OptionError, match="num_samples must be >= 1 and max_length >= 2, got 0 and 2048"):
        rankfold.load_calibration(folder, source, num_samples=0)


def test_pixels_that_are_none(processor):
    good = torch.zeros(2, 3, 28, 28)
    with pytest.raises(
        DataError, match=r"ids must be a tensor .* or pixels \(images, channels, height, width\), got \[2, 3\]"
    ):
        CalibrationData(torch.zeros(2, 3), "x", "x", 0)
    with pytest.raises(DataError, match="held_out holds NaN or infinite pixels"):
        CalibrationData(good, "x", "x", 0, good * float("nan"))


def test_images_and_texts_are_not_taken_for_each_other():
    small = CalibrationData(torch.zeros(2, 3, 14, 14), "x", "x", 0)
    with pytest.raises(
        DataError, match=r"the vision component of .* takes images of \[3, 28, 28\].*, got \[3, 14, 14\]"
    ):
        rankfold.calibrate(opened_encoder("vit-head"), small)
    with pytest.raises(DataError, match="the language component of .* takes token ids, got images; calibrate on text"):
        rankfold.calibrate(opened_encoder("bert"), small)
    with pytest.raises(DataError, match="no images at 'pydoc': expected a folder of images"):
        rankfold.load_calibration("pydoc", opened_encoder("clip-vision"))
