"""Texts that somebody might calibrate or evaluate on, and what is in them."""

import csv
import io
import json
import os
import random
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as parquet

WORDS = " ".join(topics[key] for key in ("class", "for")).split()
ODD = [
    "",
    "   ",
    "\t\n ",
    "\0" * 9,
    "a\0b",
    "é" * 40,
    "𝒳 שלום ✓",
    "\u2028x\x85y\x0bz",
    "<s></s>",
    "word " * 4000,
    "x" * 40000,
]
ODD += ["\r\n\r\n", "a\rb", '{"text": "in a text"}', "[bold]", "\ufeffx", "\u202ereversed", "%s {} \\"]
FIELDS = ["text"] * 40 + ["", "x", "content", "é", "[bold]", "text\n"]
ROWS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
UNKNOWN = "whatever the library makes of the bytes"


class Hostile(NamedTuple):
    """A file that was written, and what a reader may make of it."""

    name: str
    what: str
    rows: tuple[str, ...] | str | None  # documents; None: it must be refused; or UNKNOWN


def hostile_text(place: Path, rng: random.Random, field: str) -> Hostile:
    """Write a text under ``place``; it is read with ``field``."""
    kind = rng.choice(["txt", "jsonl", "jsonl", "json", "csv", "tsv", "parquet", "parquet"] * 4 + ["none"])
    if kind == "none":
        return _no_file(place, rng)
    rows = [" ".join(rng.choices(WORDS, k=rng.choice([1, 9, 90]))) for _ in range(rng.choice([0, 1, 5] + [40] * 9))]
    for _ in range(rng.randrange(3)):
        rows.insert(rng.randrange(len(rows) + 1), rng.choice(ODD))
    writers = {"txt": _txt, "jsonl": _jsonl, "json": _json, "csv": _csv, "tsv": _tsv, "parquet": _parquet}
    content, what, rows = writers[kind](rows, rng, field)
    others = [".txt", ".jsonl", ".json", ".csv", ".parquet", "", ".gz"]
    suffix = rng.choice([f".{kind}"] * 9 + [f".{kind}".upper(), *others])
    name = rng.choice(["in", "in put", "é", "[bold]", "a:b", "-x", "x" * 200]) + suffix
    if suffix.lower() != f".{kind}":
        what, rows = f"{what}, named {suffix!r}", UNKNOWN
    (place / name).write_bytes(content)
    return Hostile(f"./{name}", f"{kind}, {what}", _readable(rows))


def _readable(rows):
    """Nobody calibrates on nothing."""
    return None if isinstance(rows, tuple) and not any(row.strip() for row in rows) else rows


def _no_file(place: Path, rng: random.Random) -> Hostile:
    name = rng.choice(["in.txt", "in.jsonl", "in.parquet", "in"])
    what = rng.choice(["folder", "pipe", "link to itself", "link to nothing", "nothing"])
    if what == "folder":
        (place / name).mkdir()
    elif what == "pipe":
        os.mkfifo(place / name)
    elif what != "nothing":
        (place / name).symlink_to(name if what == "link to itself" else "nowhere")
    return Hostile(name, what, None)


def _txt(rows: list[str], rng: random.Random, field: str):
    text = "\n".join(rows)
    read = (text.replace("\r\n", "\n").replace("\r", "\n"),)
    at = rng.randrange(len(text) + 1)
    head, tail = text[:at].encode(), text[at:].encode()
    kinds = {
        "plain": (text.encode(), read),
        "with a mark": (b"\xef\xbb\xbf" + text.encode(), (read[0].removeprefix("\ufeff"),)),
        "lines of Windows": (read[0].replace("\n", "\r\n").encode(), read),
        "UTF-16": (b"\xff\xfe" + text.encode("utf-16-le"), None),
        "Latin-1": (head + "é".encode("latin-1") + b" " + tail, None),
        "half a pair": (head + b"\xed\xa0\x80" + tail, None),
        "cut in a character": (text.encode() + "é".encode()[:1], None),
        "zero bytes": (head + bytes(50) + tail, UNKNOWN),
        "rubbish": (rng.randbytes(4000), None),
        "empty": (b"", None),
    }
    what = rng.choice(sorted(kinds))
    content, expected = kinds[what]
    if what == "with a mark" and text.startswith("\ufeff"):
        expected = UNKNOWN
    return content, what, expected


def _jsonl(rows: list[str], rng: random.Random, field: str):
    lines = [json.dumps({"n": i, "text": row}, ensure_ascii=rng.random() < 0.5) for i, row in enumerate(rows)]
    good = tuple(rows) if field == "text" or not rows else None
    at = rng.randrange(len(lines) + 1)
    bad = {
        "a number": '{"text": 5}',
        "null": '{"text": null}',
        "a list": '{"text": ["a", "b"]}',
        "an object": '{"text": {"text": "x"}}',
        "a giant number": '{"n": ' + "9" * 9000 + ', "text": "x"}',
        "depth": '{"n": ' + "[" * 200000 + "]" * 200000 + ', "text": "x"}',
        "open depth": "[" * 200000,
        "another field": '{"body": "x"}',
        "a row that is a text": '"text"',
        "a row that is null": "null",
        "half a pair": '{"text": "a\\ud800b"}',
        "a raw zero": '{"text": "a\0b"}',
        "two rows in a line": '{"text": "a"}{"text": "b"}',
        "a comma": '{"text": "a"},',
        "half a row": '{"text": "a',
        "no JSON": "text",
        "single quotes": "{'text': 'a'}",
    }
    harmless = {
        "an infinite number": ('{"n": 1e400, "text": "x"}', "x"),
        "NaN": ('{"n": NaN, "text": "x"}', "x"),
        "one field twice": ('{"text": "a", "text": "b"}', "b"),
        "a pair": ('{"text": "\\ud83d\\ude00"}', "😀"),
    }
    what = rng.choice(
        ["plain", "blank lines", "lines of Windows", "with a mark", "Latin-1", "an array", *bad, *harmless]
    )
    if what in bad:
        return "\n".join([*lines[:at], bad[what], *lines[at:]]).encode(), what, None
    if what in harmless:
        line, row = harmless[what]
        expected = (*rows[:at], row, *rows[at:]) if field == "text" else None
        return "\n".join([*lines[:at], line, *lines[at:]]).encode(), what, expected
    content = "\n".join(lines).encode()
    if what == "blank lines":
        content = b"\n\n" + content.replace(b"\n", b"\n \n") + b"\n\n"
    elif what == "lines of Windows":
        content = content.replace(b"\n", b"\r\n")
    elif what == "with a mark":
        content = b"\xef\xbb\xbf" + content
    elif what == "Latin-1":
        content, good = b'{"text": "\xe9"}\n' + content, None
    elif what == "an array":
        content, good = json.dumps([{"text": row} for row in rows]).encode(), None
    return content, what, good


def _json(rows: list[str], rng: random.Random, field: str):
    objects = [{"n": i, "text": row} for i, row in enumerate(rows)]
    good = tuple(rows) if field == "text" else None
    at = rng.randrange(len(objects) + 1)
    whole = json.dumps(objects, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 2]))
    cut = rng.randrange(len(whole))
    kinds = {
        "a list": (whole, good),
        "a list in an object": (json.dumps({"version": 1, "data": objects}), good),
        "one row": (json.dumps({"text": "x"}), ("x",) if field == "text" else None),
        "two lists": (json.dumps({"train": [{"text": "a"}], "test": [{"text": "b"}]}), None),
        "no rows": ("[]", None),
        "a text": ('"text"', None),
        "a number": ("5", None),
        "a row that is a number": (json.dumps([*objects[:at], 5, *objects[at:]]), None),
        "a text that is a list": (json.dumps([*objects[:at], {"text": ["a"]}, *objects[at:]]), None),
        "a row without it": (json.dumps([*objects[:at], {"n": 1}, *objects[at:]]), None),
        "cut": (whole[:cut], None),
        "two values": (whole + whole, None),
        "a giant number": ('[{"n": ' + "9" * 9000 + ', "text": "x"}]', None),
        "depth": ("[" * 200000 + "]" * 200000, None),
        "half a pair": ('[{"text": "a\\ud800b"}]', None),
    }
    what = rng.choice(["a list", "a list in an object"] * 4 + sorted(kinds))
    content, expected = kinds[what]
    return content.encode(), what, expected


def _csv(rows: list[str], rng: random.Random, field: str, delimiter: str = ","):
    sink = io.StringIO()
    csv.writer(sink, delimiter=delimiter, lineterminator=rng.choice(["\n", "\r\n"])).writerows(
        [("n", "text"), *enumerate(rows)]
    )
    table, good = sink.getvalue(), tuple(rows) if field == "text" else None
    if any("\r" in row for row in rows):  # a line end within a field is one as in any text
        good = good and UNKNOWN
    kinds = {
        "plain": (table.encode(), good),
        "with a mark": (b"\xef\xbb\xbf" + table.encode(), good),
        "a field too many": ((table + delimiter.join("abc") + "\n").encode(), None),
        "a field too few": ((table + "a\n").encode(), None),
        "an open quote": ((table + f'1{delimiter}"a').encode(), None),
        "a text after a quote": ((table + f'1{delimiter}"a"b\n').encode(), None),
        "no column of it": ((f"n{delimiter}body\n1{delimiter}x\n").encode(), None),
        "only names": ((f"n{delimiter}text\n").encode(), None),
        "one name twice": ((f"text{delimiter}text\na{delimiter}b\n").encode(), None),
        "zero bytes": (table.encode() + b"1" + delimiter.encode() + bytes(9) + b"\n", UNKNOWN),
        "Latin-1": (table.encode() + b"1" + delimiter.encode() + b"\xe9\n", None),
        "rubbish": (rng.randbytes(4000), None),
        "empty": (b"", None),
    }
    what = rng.choice(["plain", "with a mark"] * 4 + sorted(kinds))
    return kinds[what][0], what, kinds[what][1]


def _tsv(rows: list[str], rng: random.Random, field: str):
    return _csv(rows, rng, field, "\t")


def _parquet(rows: list[str], rng: random.Random, field: str):
    columns = {
        "text": pa.array(rows, pa.string()),
        "long text": pa.array(rows, pa.large_string()),
        "a dictionary": pa.array(rows, pa.string()).dictionary_encode(),
        "with null": pa.array([*rows, None], pa.string()),
        "bytes": pa.array([row.encode() for row in rows], pa.binary()),
        "numbers": pa.array(range(len(rows)), pa.int64()),
        "lists": pa.array([[row] for row in rows], pa.list_(pa.string())),
        "objects": pa.array([{"text": row} for row in rows], pa.struct([("text", pa.string())])),
        "nothing": pa.nulls(len(rows)),
    }
    what = rng.choice(sorted(columns))
    table = pa.table({"n": pa.array(range(len(columns[what]))), "text": columns[what]})
    sink = io.BytesIO()
    options = {"row_group_size": rng.choice([1, 7, 1000]), "compression": rng.choice(["snappy", "none", "zstd"])}
    parquet.write_table(table, sink, **options)
    content, good = sink.getvalue(), tuple(rows) if what in ("text", "long text", "a dictionary") else None
    good = good if field == "text" else None
    how = rng.choice(["whole"] * 4 + ["cut", "bit", "zeros", "only the end", "appended"])
    if how == "whole":
        return content, what, good
    at = rng.randrange(len(content))
    damaged = {
        "cut": content[:at],
        "bit": content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :],
        "zeros": content[:at] + bytes(len(content[at : at + 64])) + content[at + 64 :],
        "only the end": content[at:],
        "appended": content + b"\0" * 7,
    }
    expected = UNKNOWN if how in ("bit", "zeros") or not rows else None
    return damaged[how], f"{what}, {how} at {at}", expected
