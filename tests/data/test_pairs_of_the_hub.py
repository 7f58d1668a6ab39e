"""Image-text examples out of a data set on the hub: `datasets` itself, on files as the hub has them."""

import io
import json
import sys

import datasets
import pytest
import torch

import rankfold
from families import opened as opened_text
from rankfold.cli import main
from rankfold.data.hub import image_text_rows
from rankfold.data.image_text import has_images
from rankfold.errors import CheckpointError, DataError
from tiny_pairs import FAMILIES, opened, picture, save_llava, tiny_model

ROWS, SHARDS = 32, 4
NAME = "hub:someone/pairs"


def shard(number: int) -> datasets.Dataset:
    """Rows of which every fourth has no image."""
    rows = range(number * ROWS // SHARDS, (number + 1) * ROWS // SHARDS)
    columns = {
        "question": [f"what is in {'it ' * (row % 6)}{row}?" for row in rows],
        "image": [None if row % 4 == 3 else picture(row) for row in rows],
        "answer": [f"a thing {row * 7}" for row in rows],
    }
    features = datasets.Features(
        {"question": datasets.Value("string"), "image": datasets.Image(), "answer": datasets.Value("string")}
    )
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    for number in range(SHARDS):
        shard(number).to_parquet(folder / f"train-{number}.parquet")
    return folder


@pytest.fixture
def hub(shards, monkeypatch):
    """The call, given to `datasets` with the files in place of the name."""
    calls, load = [], datasets.load_dataset

    def load_dataset(path, config, **options):
        calls.append((path, config, options))
        return load("parquet", data_files={"train": f"{shards}/*.parquet"}, **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def test_a_data_set_gives_the_examples_that_a_file_of_its_rows_gives(hub, tmp_path):
    """In another order: the same inputs, images and all, as many fitted and held out."""
    source, processor = opened("llava"), FAMILIES["llava"].processor()
    lines = []
    for row in range(ROWS):
        found = shard(row * SHARDS // ROWS)[row % (ROWS // SHARDS)]
        if found["image"] is not None:
            found["image"].save(tmp_path / f"{row}.png")
        lines.append(json.dumps(found | {"image": found["image"] and f"{row}.png"}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    expected = rankfold.load_calibration(tmp_path / "pairs.jsonl", source, num_samples=28, tokenizer=processor)
    made = rankfold.load_calibration(NAME, source, num_samples=28, tokenizer=processor)
    assert hub == [("someone/pairs", None, {"split": "train", "streaming": True})]

    def digests(examples):
        return {example.sha256 for example in (*examples.ids, *examples.held_out)}

    assert len(digests(made)) == 31 and len(digests(expected) | digests(made)) == ROWS
    assert (len(made.ids), len(made.held_out)) == (28, 3)
    facts = made.describe()
    assert facts["source"] == NAME and facts["origin"] == "someone/pairs:train"
    assert facts["draw"] == "stream, buffer of 1000 rows" and facts["kind"] == "image-text examples"
    again = rankfold.load_calibration(NAME, source, num_samples=28, tokenizer=processor)
    other = rankfold.load_calibration(NAME, source, num_samples=28, seed=1, tokenizer=processor)
    assert again.describe() == facts and other.sha256 != made.sha256
    assert all(torch.equal(one.read()["input_ids"], one.ids) for one in made.ids)


def test_few_are_drawn_from_all_shards(hub, monkeypatch):
    monkeypatch.setattr("rankfold.data.hub.BUFFER", 160)
    rows = image_text_rows(NAME, 0).rows
    numbers = {int(next(rows)[1]["question"].rstrip("?").split()[-1].split("it")[-1]) for _ in range(8)}
    assert len({number * SHARDS // ROWS for number in numbers}) > 1 and numbers != set(range(8))


def test_the_vision_part_takes_its_images(hub):
    source = rankfold.open_model(tiny_model("llava"), device="cpu", component="vision")
    processor = FAMILIES["llava"].processor().image_processor
    found = rankfold.load_calibration(NAME, source, num_samples=12, tokenizer=processor)
    everything = torch.cat(
        [processor(images=[picture(row)], return_tensors="pt")["pixel_values"] for row in range(ROWS) if row % 4 != 3]
    )
    known = {image.numpy().tobytes() for image in everything}
    drawn = [image.numpy().tobytes() for image in (*found.ids, *found.held_out)]
    assert len(drawn) == len(set(drawn)) == 13 and set(drawn) <= known
    assert found.describe()["source"] == NAME and found.describe()["draw"].startswith("stream")


def test_both_parts_by_the_command_line(hub, tmp_path, monkeypatch, capsys):
    save_llava(tmp_path / "llava")
    monkeypatch.chdir(tmp_path)
    line = f"compress llava -o small --components language=0.3,vision=0.2 --calibration {NAME}:easy --num-samples 8"
    rest = ["--device", "cpu", "--method", "modegpt", "--rank-multiple", "2"]
    monkeypatch.setattr(sys, "argv", ["rankfold", *line.split(), *rest])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0, capsys.readouterr().err
    assert {call[:2] for call in hub} == {("someone/pairs", "easy")}
    card = (tmp_path / "small" / "README.md").read_text()
    assert card.count(f"of `{NAME}:easy`") == 2 and str(tmp_path) not in card


def rows_of(monkeypatch, *rows: dict) -> None:
    monkeypatch.setattr("rankfold.data.hub._image_text_rows", lambda *_: iter(rows))


def encoded(number: int) -> dict:
    buffer = io.BytesIO()
    picture(number).save(buffer, "png")
    return {"bytes": buffer.getvalue(), "path": None}


def test_an_answer_may_be_one_of_several(monkeypatch):
    """As in ScienceQA; and a row may have several images."""
    rows_of(monkeypatch, {"question": "who?", "choices": ["you", "me"], "answer": 1, "image": [encoded(0), encoded(1)]})
    processor = FAMILIES["llava"].processor()
    made = rankfold.load_calibration(NAME, opened("llava"), tokenizer=processor)
    text = processor.tokenizer.decode(made.ids[0].ids[0]).replace(" ", "")
    assert text == "[user]" + "<image>" * 8 + "who?[assistant]me"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, "hub:someone/pairs, row 0: there is no column 'image'; it has: question"),
        ({"question": "a", "image": "a.png"}, "row 0: column 'image' holds no encoded image, got a.png"),
        ({"question": "a", "image": {"bytes": b"x", "path": None}}, "row 0, its image is not a readable image"),
        ({"image": None}, "hub:someone/pairs, row 0 has no text column 'text'; the row has: image"),
        ({"question": "a", "image": None, "answer": 2, "choices": ["x"]}, "column 'answer' holds int, not text"),
        ({"question": "a", "image": None, "answer": 0, "choices": [1]}, "column 'choices' holds int, not text"),
    ],
)
def test_rows_that_cannot_be_used(row, message, monkeypatch):
    rows_of(monkeypatch, row)
    with pytest.raises(DataError, match=message) as error:
        rankfold.load_calibration(NAME, opened("llava"), tokenizer=FAMILIES["llava"].processor())
    assert "\n" not in str(error.value)


def test_what_is_not_to_be_had_is_one_line(monkeypatch, tmp_path):
    source = opened("llava")
    for name in ("hub:pairs", "hub:", "hub:a/b/c", "hub:/x"):
        with pytest.raises(
            DataError, match="no data set at 'hub:.*': expected hub:OWNER/NAME, or hub:OWNER/NAME:CONFIG"
        ):
            rankfold.load_calibration(name, source)
    with pytest.raises(DataError, match="takes no images with its text, and hub:someone/pairs has an image column"):
        rankfold.load_calibration(NAME, opened_text("llama"))
    assert has_images(NAME, source) and has_images(NAME, opened_text("llama"))

    def unreachable(*_, **__):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    vision = rankfold.open_model(tiny_model("llava"), device="cpu", component="vision")
    for part in (source, vision):
        with pytest.raises(
            CheckpointError, match="cannot read 'someone/pairs' from the hub .no route.; check the connection, or name"
        ):
            rankfold.load_calibration(NAME, part)
    rows_of(monkeypatch)
    with pytest.raises(DataError, match="hub:someone/pairs has no rows"):
        rankfold.load_calibration(NAME, source)
    with pytest.raises(DataError, match="hub:someone/pairs holds no images in the column 'image'"):
        rankfold.load_calibration(NAME, vision)
