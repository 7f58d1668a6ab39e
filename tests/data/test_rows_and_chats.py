"""Files with rows are read as rows, whatever they are called; rows of turns become chats in the words of the model."""

import csv
import json

import pyarrow
import pyarrow.parquet
import pytest

import rankfold
from families import opened
from rankfold.data import streaming as pieces
from rankfold.data.text import named_column, read_text
from rankfold.data.tokens import encode
from rankfold.errors import DataError
from rankfold.evaluation.text import windows_of_text
from tiny_pairs import tokenizer

ROWS = [{"n": i, "text": f'row {i}: a "quote", a comma\n\tand\u2028lines ü'} for i in range(5)]
TEXTS = tuple(row["text"] for row in ROWS)
TEMPLATE = "{% for turn in messages %}[{{ turn['role'] }}]{{ turn['content'] }}\n{% endfor %}"
TURNS = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "that."}]
SHAREGPT = [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "that."}]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "wh"}, {"type": "text", "text": "at?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "that."}]},
]
WRITTEN = "[user]what?\n[assistant]that.\n"


def table(path, rows, delimiter):
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.DictWriter(file, rows[0], delimiter=delimiter)
        lines.writeheader()
        lines.writerows(rows)


FORMS = {
    "a.jsonl": lambda path, rows: path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8"),
    "a.ndjson": lambda path, rows: path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8"),
    "a.json": lambda path, rows: path.write_text(json.dumps(rows), encoding="utf-8"),
    "with mark.json": lambda path, rows: path.write_text(json.dumps(rows, indent=2), encoding="utf-8-sig"),
    "lines.json": lambda path, rows: path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8"),
    "inside.JSON": lambda path, rows: path.write_text(json.dumps({"version": 1, "data": rows}), encoding="utf-8"),
    "a.csv": lambda path, rows: table(path, rows, ","),
    "a.tsv": lambda path, rows: table(path, rows, "\t"),
    "a.parquet": lambda path, rows: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_same_rows_are_the_same_documents(name, tmp_path):
    FORMS[name](tmp_path / name, ROWS)
    assert read_text(str(tmp_path / name)).documents == TEXTS
    assert named_column([str(tmp_path / name)], "n") == "n"


@pytest.mark.parametrize("name", FORMS)
def test_another_column_is_read_where_it_is_named(name, tmp_path):
    FORMS[name](tmp_path / name, [{"body": text, "text": "no"} for text in TEXTS])
    assert read_text(str(tmp_path / name), column="body").documents == TEXTS


def test_one_object_with_a_text_is_one_document(tmp_path):
    (tmp_path / "a.json").write_text('{"text": "x", "tags": ["y"]}')
    assert read_text(str(tmp_path / "a.json")).documents == ("x",)


def test_a_document_of_a_table_may_be_long(tmp_path):
    """Python's own limit is 131,072 characters; what it was before, it is again."""
    before = csv.field_size_limit()
    table(tmp_path / "a.csv", [{"text": "x" * 300_000}], ",")
    assert len(read_text(str(tmp_path / "a.csv")).documents[0]) == 300_000
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.json",
            '{"a": 1}',
            r"a\.json is an object with no list of rows in it \(it has: a\); give the list of rows alone",
        ),
        ("a.json", '{"a": [{"text": "x"}], "b": [{}]}', r"an object with several lists of rows in it \(it has: a, b\)"),
        ("a.json", "[1, 2]", r"a\.json, row 1 has no text column 'text'; the row is a int, not an object"),
        ("a.json", '[{"text": "x"}, {"text": 3}]', r"a\.json, row 2: column 'text' holds int, not text"),
        ("a.json", '[{"text": "x"},\n{"text": }]', r"a\.json, line 2 is not JSON \(Expecting value\)"),
        ("a.json", "[" * 100_000, r"a\.json is not JSON \((maximum recursion|Stack overflow)"),
        ("a.json", "5", r"a\.json holds one int; a list of rows is expected"),
        ("a.json", '{"text": "a"}\n{"text": 3}', r"a\.json, line 2: column 'text' holds int"),
        ("a.csv", 'text,id\n"a,1\n', r"a\.csv, line 2 is no row of a table \(unexpected end of data\)"),
        ("a.csv", "text,id\na,1\nb,2,3\n", r"a\.csv, line 3 has 3 fields and the first line names 2 columns"),
        ("a.csv", "text,text\na,b\n", r"a\.csv names a column twice in its first line \(text, text\)"),
        ("a.csv", "text\na,1\n", r"a\.csv, line 2 has 2 fields and the first line names 1 column; correct it"),
        (
            "a.csv",
            "text;id\na, b;1\n",
            r"a\.csv has semicolons between the columns of its first line \(text;id\), and commas .*with commas$",
        ),
        ("a.csv", "id\ttext\n1\ta\n", r"a\.csv has tabs between the columns of its first line"),
        ("a.csv", "id|text\n1|a\n", r"a\.csv has bars between the columns of its first line \(id\|text\), and commas"),
        (
            "a.tsv",
            "id,text\n1,a\n",
            r"a\.tsv has commas between the columns .*, and tabs are expected; save it with tabs$",
        ),
        ("a.tsv", "body\nx\n", r"a\.tsv, line 2 has no text column 'text'; the row has: body"),
        ("a.csv", "text\n", r"is empty; give a file with text"),
        ("a.jsonl.gz", "", r"a\.jsonl\.gz is packed; unpack it and give the file inside$"),
        ("a.txt.zst", "", r"a\.txt\.zst is packed"),
        ("a.arrow", "", r"a\.arrow is an Arrow file; save the rows as \.parquet"),
        ("a.xlsx", "", r"a\.xlsx is a spreadsheet; save it as \.csv"),
    ],
)
def test_what_has_no_rows_is_refused(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_text(str(tmp_path / name))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_a_file_with_columns_is_no_file_of_raw_rows(name, tmp_path):
    FORMS[name](tmp_path / name, ROWS)
    with pytest.raises(DataError, match=r"is no file of raw rows, one a line; give a\.\w+ by itself"):
        read_text(f"wikitext2:{tmp_path / name}")


def test_a_column_with_a_delimiter_in_its_name_is_read(tmp_path):
    (tmp_path / "a.csv").write_text("text; cleaned\nsome words\n")
    assert read_text(str(tmp_path / "a.csv"), column="text; cleaned").documents == ("some words",)


def test_a_folder_is_called_one(tmp_path):
    with pytest.raises(DataError, match=r"\(it is a folder; give a file in it\)"):
        read_text(str(tmp_path))


@pytest.mark.parametrize("name", ["page.html", "notes.md", "code.py", "wiki.train.tokens", "plain"])
def test_any_other_file_is_one_text(name, tmp_path):
    (tmp_path / name).write_text("<p>as it is,\nwritten</p>")
    assert read_text(str(tmp_path / name)).documents == ("<p>as it is,\nwritten</p>",)


def speaking():
    made = tokenizer()
    made.chat_template = TEMPLATE
    return made


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
@pytest.mark.parametrize(
    ("column", "turns", "field"),
    [
        ("messages", TURNS, "text"),
        ("messages", PARTS, "text"),
        ("conversations", SHAREGPT, "text"),
        ("conversations", TURNS, "text"),
        ("dialogue", TURNS, "dialogue"),
    ],
)
def test_turns_are_written_by_the_template(name, column, turns, field, tmp_path):
    FORMS[name](tmp_path / name, [{"n": i, column: turns} for i in range(3)])
    text = read_text(str(tmp_path / name), column=field)
    assert text.joined(speaking(), "model") == 3 * WRITTEN


def test_a_named_column_text_comes_before_a_chat(tmp_path):
    FORMS["a.jsonl"](tmp_path / "a.jsonl", [{"text": "x", "messages": TURNS}])
    assert read_text(str(tmp_path / "a.jsonl")).documents == ("x",)


def test_chats_calibrate_and_evaluate_as_the_model_reads_them(tmp_path, monkeypatch):
    """The same ids in both, none of them between two chats, whole or in pieces."""
    FORMS["a.jsonl"](tmp_path / "a.jsonl", [{"messages": TURNS}] * 40)
    name, source = str(tmp_path / "a.jsonl"), opened("llama")
    source.processors._tokenizer = speaking()
    expected = source.tokenizer(40 * WRITTEN, add_special_tokens=False, return_tensors="pt").input_ids[0]
    assert encode(read_text(name), source).equal(expected)
    assert windows_of_text(read_text(name), source.tokenizer, "model", source.config, 32, 1)[0].equal(expected[:32])
    monkeypatch.setattr(pieces, "LARGE", 100)
    tokens = rankfold.load_calibration(name, source, num_samples=2, max_length=16)
    assert tokens.draw.startswith("rows of slots")
    whole = "".join(source.tokenizer.convert_ids_to_tokens(expected))
    assert all("".join(source.tokenizer.convert_ids_to_tokens(row[:8])) in whole for row in tokens.ids)


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (
            [{"rol": "user", "content": "x"}],
            r"line 2, turn 1 has no role; a turn has 'role' and 'content'.*got 'rol', 'content'",
        ),
        ([TURNS[0], {"role": "assistant"}], r"line 2, turn 2 has no content"),
        ([{"role": "user", "content": 5}], r"line 2, turn 1: the content holds int, not text"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"line 2, turn 1 has a part that is not text"),
        ([], r"line 2 has no text column 'text', and 'messages' holds an empty list, not a list of turns"),
        ("what?", r"line 2 has no text column 'text', and 'messages' holds str, not a list of turns"),
        ([{"role": "user", "content": "\ud800"}], r"line 2 has half a character"),
    ],
)
def test_a_chat_that_is_none_names_its_row_and_turn(turns, message, tmp_path):
    FORMS["a.jsonl"](tmp_path / "a.jsonl", [{"messages": TURNS}, {"messages": turns}])
    with pytest.raises(DataError, match=message):
        read_text(str(tmp_path / "a.jsonl")).joined(speaking(), "model")


def test_a_model_without_a_template_takes_no_chats(tmp_path):
    FORMS["a.jsonl"](tmp_path / "a.jsonl", [{"messages": TURNS}])
    with pytest.raises(
        DataError, match=r"line 1 is a chat, and the tokenizer of tiny has no chat template; give rows with"
    ):
        read_text(str(tmp_path / "a.jsonl")).joined(tokenizer(), "tiny")


def test_a_template_that_refuses_a_chat_names_the_row(tmp_path):
    FORMS["a.jsonl"](tmp_path / "a.jsonl", [{"messages": TURNS}])
    strict = tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        DataError, match=r"line 1: the chat template of tiny does not take this chat \(roles must alternate\)"
    ):
        read_text(str(tmp_path / "a.jsonl")).joined(strict, "tiny")
