"""The same names give the same samples in every version: digests of those that the first version drew."""

import csv
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import torch

from rankfold.data.load import load_calibration

WORDS = [
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "über", "naïve",
    "日本", "\u2028", "end.",
]  # fmt: skip


def code_points(text: str, return_tensors: str, verbose: bool = True, add_special_tokens: bool = True):
    """A tokenizer with one id a character."""
    return SimpleNamespace(input_ids=torch.tensor([[ord(c) % 997 for c in text]], dtype=torch.long))


MODEL = SimpleNamespace(
    name="model",
    context_length=4096,
    tokenizer=code_points,
    config=SimpleNamespace(vocab_size=1000),
    part=SimpleNamespace(takes_images=False),
    architecture=SimpleNamespace(decoder=True, needs_start=False),
    image_token=None,
)


def rows() -> list[dict]:
    drawn = random.Random(0)
    return [{"text": " ".join(drawn.choices(WORDS, k=drawn.randint(0, 60))), "n": i} for i in range(300)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    place = tmp_path_factory.mktemp("files")
    texts = [row["text"] for row in rows()]
    (place / "a.txt").write_text("\n".join(texts), encoding="utf-8")
    (place / "b.txt").write_text("".join(reversed(texts)), encoding="utf-8")
    (place / "a.jsonl").write_text("\n".join(map(json.dumps, rows())), encoding="utf-8")
    (place / "a.json").write_text(json.dumps({"data": rows()}), encoding="utf-8")
    with (place / "a.csv").open("w", encoding="utf-8", newline="") as file:
        lines = csv.DictWriter(file, ["text", "n"])
        lines.writeheader()
        lines.writerows(rows())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows()), place / "a.parquet", row_group_size=50)
    return place


GOLDEN = {
    "a.txt": ("6e9a40e66365f5597950a61ada69ccdb", "9606d4ac897ffcd0cd48c1478a9e21b6"),
    "wikitext2:a.txt": ("2614b813fdba29f73dc6dad52a821cd5", "7acaffe5708a4b364a49acf7c79db905"),
    "a.jsonl": ("75811da343890e62793acb69c3e35562", "1b80d0a7ed879d1ec4eaac515bc7c548"),
    "a.json": ("75811da343890e62793acb69c3e35562", "1b80d0a7ed879d1ec4eaac515bc7c548"),
    "a.csv": ("75811da343890e62793acb69c3e35562", "1b80d0a7ed879d1ec4eaac515bc7c548"),
    "a.parquet": ("75811da343890e62793acb69c3e35562", "1b80d0a7ed879d1ec4eaac515bc7c548"),
    "mixture": ("db7556179ac261d9fcac1748b9408077", "d82059d4ff5b5eef20459c1684df35b9"),
    "all of a mixture": ("3797870eebf415e49ba1238e27873569", "4c898f1ae41615566656ba1b76746715"),
    "calibration/c4_demo.jsonl": ("d27ff7964373c3addb76bc67aa040de0", "33d7e0775e7a9e6aeb2111244a81f041"),
    "calibration/wiki_demo.txt": ("47260a221ce0065bc297d800d66c992b", "99e4883240c52f31598cfd92d635c518"),
    "wikitext2:text/wiki.test.raw": ("f1b6f31eb855ab68a8e4169672206ce2", "d06704168a50039b5c8c6a3ef6e470b7"),
}


def drawn(data, **options) -> tuple[str, str]:
    found = load_calibration(data, MODEL, **{"num_samples": 24, "max_length": 128, "seed": 3} | options)
    facts = found.describe()
    return facts["sha256"], facts["held_out_sha256"]


@pytest.mark.parametrize("name", ["a.txt", "wikitext2:a.txt", "a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_a_file_gives_the_samples_it_gave(name, files, monkeypatch):
    monkeypatch.chdir(files)
    assert drawn(name) == GOLDEN[name]


def test_a_mixture_gives_the_samples_it_gave(files, monkeypatch):
    monkeypatch.chdir(files)
    assert drawn({"a.jsonl": 0.7, "b.txt": 0.3}) == GOLDEN["mixture"]
    assert drawn({"a.jsonl": 0.7, "b.txt": 0.3}, num_samples=400) == GOLDEN["all of a mixture"]


@pytest.mark.skipif("RANKFOLD_DATA" not in os.environ, reason="the texts of the benchmarks are at $RANKFOLD_DATA")
@pytest.mark.parametrize(
    "name", ["calibration/c4_demo.jsonl", "calibration/wiki_demo.txt", "wikitext2:text/wiki.test.raw"]
)
def test_the_texts_of_the_benchmarks_give_the_samples_they_gave(name, monkeypatch):
    monkeypatch.chdir(Path(os.environ["RANKFOLD_DATA"]))
    assert drawn(name, max_length=2048) == GOLDEN[name]
