"""Text sources: local files, the field's WikiText-2 rows, and what is asked of the hub (which is never called)."""

import concurrent.futures
import itertools
import json
import os
import re
import shutil
import unittest.mock
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub.errors import GatedRepoError

from rankfold.data.hub import ALIASES, LANGUAGES
from rankfold.data.text import Text, read_text
from rankfold.errors import CheckpointError, DataError

RAW = " \n = Robert = \n \n Robert is an actor . \n\n He left . \n"


def write(path, text: str):
    path.write_text(text, encoding="utf-8", newline="")
    return str(path)


def jsonl(path, rows, **kwargs):
    return write(path, "".join(json.dumps(row, **kwargs) + "\n" for row in rows))


def parquet(path, **columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


@pytest.fixture
def hub(monkeypatch):
    """Stands in for ``datasets.load_dataset``: notes the call, gives the rows."""
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        if isinstance(load_dataset.rows, BaseException):
            raise load_dataset.rows
        return load_dataset.rows

    load_dataset.rows = [{"text": "one ", "sentence": "one "}, {"text": "two", "sentence": "two"}]
    load_dataset.calls = calls
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return load_dataset


def test_a_text_file_is_one_document(tmp_path):
    name = write(tmp_path / "a.txt", "first line\n\nüber β\n")
    text = read_text(name)
    assert text.documents == ("first line\n\nüber β\n",) and text.joined() == "first line\n\nüber β\n"
    assert text.name == name and text.origin.startswith("file:") and str(tmp_path) not in text.origin


@pytest.mark.parametrize("name, rows", [("a.txt", ("ab\ncd",)), ("a.jsonl", ("ab", "cd"))])
def test_a_mark_in_front_is_no_text(tmp_path, name, rows):
    """Editors of Windows write one."""
    lines = "\n".join(rows) if name == "a.txt" else "\n".join(json.dumps({"text": row}) for row in rows)
    (tmp_path / name).write_text(lines, encoding="utf-8-sig")
    assert read_text(str(tmp_path / name)).documents == rows


def test_a_suffix_in_capitals_is_the_same_suffix(tmp_path):
    (tmp_path / "a.JSONL").write_text('{"text": "ab"}\n')
    assert read_text(str(tmp_path / "a.JSONL")).documents == ("ab",)


def test_origin_is_the_same_however_the_file_is_named(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ["a.txt", "./a.txt", "~/a.txt", str(tmp_path / "a.txt"), "wikitext2:a.txt"]
    (tmp_path / "a.txt").write_text("text\n")
    assert len({read_text(n).origin for n in names}) == 1


def test_rows_of_a_raw_file_are_those_of_wikitext_2_in_the_field(tmp_path):
    name = write(tmp_path / "wiki.test.raw", RAW)
    reference = "\n\n".join("" if not line.strip() else line + "\n" for line in RAW.split("\n")[:-1])
    for alias in ("wikitext2", "ptb"):
        text = read_text(f"{alias}:{name}", use="evaluation")
        assert text.joined() == reference
        assert text.documents == ("", " = Robert = \n", "", " Robert is an actor . \n", "", " He left . \n")
        name = write(tmp_path / "wiki.test.raw", RAW.rstrip("\n"))  # the last row counts without its newline too
        assert read_text(f"{alias}:{name}", use="evaluation").documents == text.documents
        name = write(tmp_path / "wiki.test.raw", RAW)


def test_jsonl_rows_are_documents(tmp_path):
    name = jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "zwei ü", "id": 3}])
    assert read_text(name).joined() == "one\n\nzwei ü"
    assert read_text(jsonl(tmp_path / "b.jsonl", [{"body": "x"}]), column="body").documents == ("x",)
    assert read_text(write(tmp_path / "c.jsonl", '\n{"text": "x"}\n\n  \n{"text": "y"}')).documents == ("x", "y")


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_jsonl_lines_end_at_newlines_only(tmp_path, character):
    """``json.dumps(ensure_ascii=False)`` leaves U+2028 and U+0085 as they are; web text is full of them."""
    document = f"before{character}after"
    name = jsonl(tmp_path / "a.jsonl", [{"text": document}, {"text": "next"}], ensure_ascii=False)
    assert read_text(name).documents == (document, "next")


def test_parquet_rows_are_documents(tmp_path):
    name = parquet(tmp_path / "a.parquet", text=["one", "zwei ü"], body=["x", "y"])
    assert read_text(name).documents == ("one", "zwei ü")
    assert read_text(name, column="body").documents == ("x", "y")


def test_python_documentation_is_on_every_machine():
    text = read_text("pydoc")
    assert len(text.joined()) > 100_000 and text.origin == "pydoc"
    assert text == read_text("pydoc")


def test_the_standard_library_is_source_code_without_tests():
    text = read_text("python-source")
    assert text.origin == "python-source" and len(text.joined()) > 3_000_000
    assert text == read_text("python-source")
    assert text.documents[0].startswith('"""Record of phased-in incompatible language changes')  # __future__.py
    for module, is_in in ((shutil, True), (concurrent.futures, True), (unittest.mock, True), (pytest, False)):
        assert (Path(module.__file__).read_text(encoding="utf-8") in text.documents) is is_in, module


def test_a_module_that_is_not_utf8_is_read_with_marks_for_what_is_not(tmp_path, monkeypatch):
    (tmp_path / "odd.py").write_bytes(b"# caf\xe9 \xc3\xa9\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert read_text("python-source").documents == ("# caf\ufffd \xe9\n",)


def test_a_mixture_is_no_single_text():
    with pytest.raises(DataError, match="'mixture' is several texts .* name one of alpaca, c4, languages"):
        read_text("mixture")


def test_reading_stops_after_the_wanted_characters(tmp_path):
    name = jsonl(tmp_path / "a.jsonl", [{"text": "x" * 10}] * 100)
    assert len(read_text(name, characters=35).documents) == 4
    with open(name, "ab") as file:
        file.write(b"\xff what nobody reads")
    assert len(read_text(name, characters=35).documents) == 4
    jsonl(tmp_path / "a.jsonl", [{"text": "x" * 10}] * 100)
    assert len(read_text(name).documents) == 100


def test_joined_separates_documents_by_a_blank_line():
    assert Text("a", ("x\n", "", "y"), "a").joined() == "x\n" + "\n\n" + "" + "\n\n" + "y"


@pytest.mark.parametrize(
    ("alias", "use", "path", "config", "split"),
    [
        ("wikitext2", "calibration", "Salesforce/wikitext", "wikitext-2-raw-v1", "train"),
        ("wikitext2", "evaluation", "Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
        ("ptb", "calibration", "ptb-text-only/ptb_text_only", "penn_treebank", "train"),
        ("ptb", "evaluation", "ptb-text-only/ptb_text_only", "penn_treebank", "test"),
        ("c4", "calibration", "allenai/c4", None, "train"),
        ("c4", "evaluation", "allenai/c4", None, "validation"),
        ("languages", "calibration", "wikimedia/wikipedia", None, "train"),
        ("alpaca", "calibration", "tatsu-lab/alpaca", None, "train"),
    ],
)
def test_hub_aliases_ask_for_the_right_rows(hub, alias, use, path, config, split):
    text = read_text(alias, use=use)
    assert text.documents == ("one ", "two") and text.origin == f"{path}:{split}"
    ((args, kwargs),) = hub.calls
    assert args == (path, config) and kwargs["split"] == split and kwargs["streaming"] is True


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_no_loading_script_is_ever_run(hub, alias):
    """`datasets` 4 refuses scripts; PTB is one, so its converted copy is read."""
    read_text(alias)
    ((_, kwargs),) = hub.calls
    assert "trust_remote_code" not in kwargs
    assert kwargs["revision"] == ("refs/convert/parquet" if alias == "ptb" else None)


def test_c4_is_evaluated_on_its_first_validation_shard(hub):
    """As the field does; calibration text comes from all training shards (test_pieces.py)."""
    read_text("c4", use="evaluation")
    files = hub.calls[0][1]["data_files"]
    assert files["validation"] == "en/c4-validation.00000-of-00008.json.gz"


def test_all_languages_have_one_shard(hub):
    read_text("languages")
    ((_, kwargs),) = hub.calls
    assert len(kwargs["data_files"]["train"]) == len(LANGUAGES)
    for language, pattern in zip(LANGUAGES, kwargs["data_files"]["train"], strict=True):
        assert fnmatch(f"20231101.{language}/train-00001-of-00017.parquet", pattern)
        assert not fnmatch(f"20231101.{language}/train-00011-of-00017.parquet", pattern)


def test_languages_are_not_evaluated_on_where_the_first_alone_would_be_read(hub):
    message = (
        r"'languages' is not for evaluation: only shuffled rows are of all languages; give a file in each language, "
        r"or one of alpaca, c4, ptb, wikitext2, pydoc, python-source, or a \.txt/"
    )
    with pytest.raises(DataError, match=message):
        read_text("languages", use="evaluation")
    assert hub.calls == []


def test_an_endless_data_set_is_read_as_far_as_needed(hub):
    hub.rows = ({"text": "x" * 10} for _ in itertools.count())
    assert len(read_text("c4", characters=95).documents) == 10


def test_a_local_copy_never_asks_the_hub(hub, tmp_path):
    read_text("wikitext2:" + write(tmp_path / "wiki.raw", RAW))
    assert hub.calls == []


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ConnectionError("cannot reach\nthe hub"), "cannot reach"),
        (OSError("no route to host"), "no route to host"),
        (ConnectionError(), "ConnectionError"),
        (TimeoutError(""), "TimeoutError"),
        (RuntimeError("x" * 5000), "x" * 200),
    ],
    ids=["two lines", "OSError", "silent", "empty", "long"],
)
def test_an_unreachable_hub_names_the_data_set_and_the_way_out(hub, error, shown):
    hub.rows = error
    message = rf"cannot read 'c4' \(allenai/c4\) from the hub \(.*{shown}.*connection, or name what is here: c4:FILE"
    with pytest.raises(CheckpointError, match=message) as caught:
        read_text("c4")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_data_set_that_the_hub_refuses_is_told_like_a_model(hub, monkeypatch):
    """`datasets` raises one error for all refusals, so the hub is asked again."""
    asked = []

    def refuse(self, name, repo_type):
        asked.append((name, repo_type))
        raise GatedRepoError("401 Client Error.", response=SimpleNamespace(headers={}, request=None))

    hub.rows = DatasetNotFoundError("it is gated, missing or private")
    monkeypatch.setattr("huggingface_hub.HfApi.auth_check", refuse)
    page = "https://huggingface.co/datasets/allenai/c4"
    with pytest.raises(CheckpointError) as raised:
        read_text("c4")
    assert str(raised.value) == (
        "cannot read 'c4' (allenai/c4) from the hub (it is gated); "
        f"accept its conditions at {page} and log in with `hf auth login`"
    )
    assert asked == [("allenai/c4", "dataset")]
    monkeypatch.setattr("huggingface_hub.HfApi.auth_check", lambda *_, **__: None)
    with pytest.raises(CheckpointError, match="missing or private.; check the connection, or name what is here: c4:"):
        read_text("c4")


def test_a_connection_lost_on_the_way_is_reported_too(hub):
    def rows():
        yield {"text": "one"}
        raise ConnectionError("reset by peer")

    hub.rows = rows()
    with pytest.raises(CheckpointError, match=r"cannot read 'wikitext2'.*reset by peer"):
        read_text("wikitext2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"text": "a"}\n{"text": \n',
            r"a\.jsonl, line 2 is not JSON \(Expecting value\); one object a line is expected",
        ),
        (
            '{"body": "a", "id": 1}\n',
            r"a\.jsonl, line 1 has no text column 'text'; the row has: body, id \(use text_column\)",
        ),
        ('{"text": "a"}\n\n{"text": 3}\n', "line 3: column 'text' holds int, not text"),
        ('{"text": null}\n', "column 'text' holds NoneType, not text"),
        ('{"text": "a \\ud800 b"}\n', "column 'text' has half a character"),
        ('{"text": ' + "9" * 5000 + "}\n", r"line 1 is not JSON \(Exceeds the limit"),
        (
            '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
            r"line 1 is not JSON \((maximum recursion|Stack overflow)",
        ),
        ('["a"]\n', "line 1 has no text column 'text'; the row is a list, not an object"),
        (
            "",
            r"text source '.*a\.jsonl' is empty; give a file with text, or one of alpaca, c4, languages, ptb, "
            r"wikitext2",
        ),
    ],
)
def test_jsonl_errors_say_what_to_fix(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        read_text(write(tmp_path / "a.jsonl", content))


def test_parquet_without_the_column_says_which_there_are(tmp_path):
    with pytest.raises(DataError, match=r"has no column 'text'; it has: body, title \(use text_column\)"):
        read_text(parquet(tmp_path / "a.parquet", body=["x"], title=["y"]))


@pytest.mark.parametrize("values", [["one", None], [1, 2], [["a"], ["b"]]], ids=["null", "numbers", "lists"])
def test_parquet_rows_that_are_not_text_are_refused(tmp_path, values):
    """As jsonl does."""
    with pytest.raises(DataError, match=r"a\.parquet.*'text'"):
        read_text(parquet(tmp_path / "a.parquet", text=values))


def test_a_damaged_parquet_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"a\.parquet"):
        read_text(write(tmp_path / "a.parquet", "PAR1 and then nothing"))


def test_text_that_is_not_utf_8_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 text \(.*\); convert it"):
        read_text(str(tmp_path / "a.txt"))


def test_a_file_that_may_not_be_read_or_is_a_pipe_is_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe.txt' \(it is a pipe or a device; write the text to a file\)"):
        read_text(str(tmp_path / "pipe.txt"))
    file = tmp_path / "a.txt"
    file.write_text("text")

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    for asked in ("open", "is_file"):  # of the file, or of a folder above it
        with (
            monkeypatch.context() as patch,
            pytest.raises(DataError, match=r"a.txt cannot be read \(Permission denied\)"),
        ):
            patch.setattr(Path, asked, refuse)
            read_text(str(file))


@pytest.mark.parametrize(
    "name", ["wikitxt2", "nowhere.txt", "nowhere.jsonl", "nowhere.parquet", "wikitext2:nowhere.raw", "", "."]
)
def test_a_source_that_is_not_there_lists_what_is(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError,
        match=r"no text at .*expected alpaca, c4, languages, ptb, wikitext2, pydoc, .*, self, mixture, "
        r"or a \.txt/\.jsonl/\.json/\.csv/\.tsv/",
    ):
        read_text(name)


@pytest.mark.parametrize("name", ["selfs", "Self", "mixtures", "language", "wikitext"])
def test_only_what_a_text_may_be_here_is_suggested(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as refused:
        read_text(name, use="evaluation")
    before, _, listed = str(refused.value).partition("expected ")
    assert name == "wikitext" or "did you mean" not in before
    assert all(suggested in listed for suggested in re.findall(r"did you mean '(\w+)'", before))


def test_what_the_model_writes_is_no_text_to_evaluate_on():
    with pytest.raises(DataError, match="'self' is what the model itself writes, not for evaluation; name one of "):
        read_text("self", use="evaluation")


@pytest.mark.parametrize("content", ["", " \n\n\t"])
def test_an_empty_text_is_refused(tmp_path, content):
    with pytest.raises(DataError, match=r"text source '.*' is empty; give a file with text"):
        read_text(write(tmp_path / "a.txt", content))
