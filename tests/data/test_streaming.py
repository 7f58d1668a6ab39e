"""Windows of texts too large to be tokenised as a whole: from everywhere, none twice, the same for a seed."""

import gzip
import io
import json
from types import SimpleNamespace

import pytest
import torch

from rankfold.data import streaming as pieces
from rankfold.data.hub import ALIASES, HubText
from rankfold.data.load import load_calibration
from rankfold.errors import DataError

LINES = 4000  # of the sample files: 120 kB, all lines different


def line(i: int) -> str:
    return f"{i:06d} über β {'abcdefghijklmnopqrstuvwxyz'[i % 26] * 10} "


def code_points(text: str, return_tensors: str, verbose: bool = True, add_special_tokens: bool = True):
    """A tokenizer with one id a character, after a start token where special tokens are wanted."""
    ids = [1] * add_special_tokens + [ord(c) for c in text]
    return SimpleNamespace(input_ids=torch.tensor([ids], dtype=torch.long))


SOURCE = SimpleNamespace(
    name="model",
    context_length=256,
    tokenizer=code_points,
    config=SimpleNamespace(vocab_size=2**21),
    part=SimpleNamespace(takes_images=False),
    architecture=SimpleNamespace(decoder=True, needs_start=False),
    image_token=None,
)


def texts(windows) -> list[str]:
    return ["".join(map(chr, row)) for row in windows.tolist()]


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    monkeypatch.setattr(pieces, "LARGE", 10_000)


@pytest.fixture(params=["txt", "raw", "jsonl", "json", "csv", "parquet", "hub", "stream"])
def large(request, tmp_path, monkeypatch):
    """The same 4000 rows as every kind of source there is."""
    rows = [line(i) for i in range(LINES)]
    kind = request.param
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet", row_group_size=300)
        return str(tmp_path / "a.parquet")
    if kind in ("hub", "stream"):
        for shard in range(8):
            with gzip.open(tmp_path / f"train.{shard}.json.gz", "wt", encoding="utf-8") as file:
                file.writelines(json.dumps({"text": row}) + "\n" for row in rows[shard * 500 : shard * 500 + 500])
        stand_in = HubText(
            "json",
            None,
            {"calibration": "train"},
            "text",
            data_files={"train": f"{tmp_path}/train.*.json.gz"},
            endless=kind == "stream",
        )
        monkeypatch.setitem(ALIASES, "here", stand_in)
        monkeypatch.setattr("rankfold.data.hub.BUFFER", 100)
        return "here"
    path = tmp_path / f"a.{kind}"
    if kind == "json":
        path.write_text(json.dumps([{"text": row} for row in rows]), encoding="utf-8")
        return str(path)
    encoded = (json.dumps({"text": row}) if kind == "jsonl" else row for row in [*["text"] * (kind == "csv"), *rows])
    path.write_text("\n".join(encoded) + "\n", encoding="utf-8")
    return f"wikitext2:{path}" if kind == "raw" else str(path)


def numbers(window: str) -> list[int]:
    """Which rows a window holds, by the numbers that stand in it whole."""
    return [int(word) for word in window.split() if len(word) == 6 and word.isdigit()]


def test_windows_come_from_the_whole_text_and_overlap_nowhere(large):
    tokens = load_calibration(large, SOURCE, num_samples=40, max_length=100, seed=1)
    assert tokens.ids.shape == (40, 100) and tokens.held_out.shape == (5, 100)
    found = [n for window in texts(torch.cat([tokens.ids, tokens.held_out])) for n in numbers(window)]
    assert len(found) > 45 and len(set(found)) == len(found) and max(found) < LINES
    quarters = torch.bincount(torch.tensor(found) * 4 // LINES, minlength=4)
    assert (quarters > len(found) / 10).all()  # a quarter each, give or take; nothing is the head of the text


def test_windows_are_text_of_the_source(large):
    """Every window is a stretch of rows that stand in the source, joined by a line end or a blank line."""
    for window in texts(load_calibration(large, SOURCE, num_samples=20, max_length=100, seed=2).ids):
        inner = [part for part in window.split("\n") if part][1:-1]
        assert inner and all(part == line(int(part[:6])) for part in inner), window
        assert chr(1) not in window  # no special token in the middle of a text


def test_the_seed_decides_the_draw(large):
    a, b, c = (load_calibration(large, SOURCE, num_samples=12, max_length=64, seed=s) for s in (0, 0, 1))
    assert torch.equal(a.ids, b.ids) and torch.equal(a.held_out, b.held_out)
    assert not torch.equal(a.ids, c.ids)
    assert a.describe()["draw"] == a.draw != "windows of the whole text"


def test_fit_windows_do_not_depend_on_how_many_more_are_drawn(large):
    few, many = (load_calibration(large, SOURCE, num_samples=n, max_length=64).ids for n in (8, 24))
    assert torch.equal(few, many[:8])


def test_a_shuffled_stream_reads_several_shards_and_not_all_rows(tmp_path, monkeypatch):
    """`datasets` itself, on local files: rows of the first windows come from several files."""
    for shard in range(16):
        with gzip.open(tmp_path / f"train.{shard:02d}.json.gz", "wt") as file:
            file.writelines(json.dumps({"text": f"{shard * 1000 + i:06d} " * 12}) + "\n" for i in range(200))
    files = {"train": f"{tmp_path}/train.*.json.gz"}
    monkeypatch.setitem(ALIASES, "here", HubText("json", None, {"calibration": "train"}, "text", None, files, True))
    monkeypatch.setattr("rankfold.data.hub.BUFFER", 50)
    tokens = load_calibration("here", SOURCE, num_samples=16, max_length=64)
    shards = {number // 1000 for window in texts(tokens.ids) for number in numbers(window)}
    assert len(shards) > 3
    assert tokens.draw.startswith("stream, buffer of")


def test_c4_is_drawn_from_all_its_shards():
    c4 = ALIASES["c4"]
    assert c4.endless and c4.data_files["train"] == "en/c4-train.*.json.gz"


def test_a_large_file_is_not_read_as_a_whole(tmp_path, monkeypatch):
    """One slot a window, whatever the size of the file."""
    path = tmp_path / "a.txt"
    path.write_text("".join(line(i) for i in range(LINES)), encoding="utf-8")
    read, real = [], pieces.decode
    monkeypatch.setattr(pieces, "decode", lambda data, where: read.append(len(data)) or real(data, where))
    load_calibration(str(path), SOURCE, num_samples=8, max_length=32)
    assert sum(read) <= 9 * 2 * 32 * 8 < path.stat().st_size / 10


@pytest.mark.parametrize("character", ["a", "é", "あ", "😀"])
def test_cut_characters_are_dropped_at_both_ends(character):
    data = (character * 6).encode()
    width = len(character.encode())
    for begin in range(2 * width):
        for end in range(begin + width, len(data) + 1):
            expected = character * (end // width - -(-begin // width))
            assert pieces._whole_characters(data[begin:end]).decode() == expected


def test_bytes_that_are_no_utf_8_are_refused_in_a_large_file_too(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait " * 2000)
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 text \(.*\); convert it"):
        load_calibration(str(tmp_path / "a.txt"), SOURCE, num_samples=4, max_length=64)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": ', r"a\.jsonl, byte \d+ is not JSON \(.*\); one object a line is expected"),
        ('{"body": "x"}', r"byte [1-9][0-9]* has no text column 'text'; the row has: body"),
    ],
)
def test_a_bad_row_of_a_large_file_is_named(tmp_path, row, message):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' + (row + "\n") * 2000)
    with pytest.raises(DataError, match=message):
        load_calibration(str(tmp_path / "a.jsonl"), SOURCE, num_samples=4, max_length=64)


def test_a_large_text_with_less_than_a_window_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 2000)
    with pytest.raises(DataError, match=r"has less than one sample of 64 tokens; choose a smaller max_length"):
        load_calibration(str(tmp_path / "a.jsonl"), SOURCE, num_samples=4, max_length=64)


def test_a_long_row_gives_a_window_from_anywhere_in_it(tmp_path):
    book = "".join(line(i) for i in range(LINES))
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": book}) + "\n") * 12)
    tokens = load_calibration(str(tmp_path / "a.jsonl"), SOURCE, num_samples=11, max_length=64)
    first = [numbers(window)[0] for window in texts(tokens.ids)]
    assert len(set(first)) == 11 and max(first) - min(first) > LINES / 3


@pytest.mark.parametrize("books", ["read", "in memory"])
def test_a_few_long_rows_give_all_samples_that_they_hold(tmp_path, books):
    rows = ["".join(line(i) for i in range(begin, begin + LINES // 3)) for begin in (0, LINES // 3, 2 * LINES // 3)]
    given = str(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    if books == "in memory":
        given = rows
    few, many = (load_calibration(given, SOURCE, num_samples=n, max_length=64) for n in (16, 40))
    assert len(many.ids) == 40 and len(many.held_out) == 5 and torch.equal(few.ids, many.ids[:16])
    windows = texts(torch.cat([many.ids, many.held_out]))
    found = [n for window in windows for n in numbers(window)]
    assert len(set(found)) == len(found) and {3 * n // LINES for n in found} == {0, 1, 2}
    every = load_calibration(given, SOURCE, num_samples=10**5, max_length=64)
    held = sum(map(len, rows)) / 64
    assert held / 16 < len(every.ids) + len(every.held_out) <= held and every.wanted is not None


class Counted(io.BytesIO):
    """A file that counts the bytes of the lines read from it."""

    count = 0

    def readline(self, size: int | None = -1) -> bytes:
        found = super().readline(size)
        self.count += len(found)
        return found


def test_a_row_longer_than_its_slot_is_not_read_again_for_every_slot_that_it_fills():
    rows = [b"a" * 50 + b"\n", b"b" * 10_000 + b"\n", b"c" * 48 + b"\n", b"d"]
    file = Counted(b"".join(rows))
    found = [row for begin in range(0, 10_200, 100) for _, row in pieces._lines(file, begin, begin + 100)]
    assert found == rows
    assert file.count < 3 * 10_200  # each slot once, and each row once
