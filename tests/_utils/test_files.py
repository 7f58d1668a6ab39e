"""Durable writes: whole or not there, also when the disk is full."""

import errno
import json
import os

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from rankfold._utils import files
from rankfold._utils.files import check_output, read_json, write_json, write_tensors, write_text
from rankfold.errors import CheckpointError

FULL = OSError(errno.ENOSPC, "No space left on device")


def raising(error):
    def call(*args, **kwargs):
        raise error

    return call


def write_any(kind: str, path, value: int = 1) -> None:
    if kind == "text":
        write_text(path, f"value {value}")
    elif kind == "json":
        write_json(path, {"value": value})
    else:
        write_tensors(path, {"value": torch.tensor([value])})


KINDS = ("text", "json", "tensors")


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_leaves_one_file(tmp_path, kind):
    write_any(kind, tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_full_at_the_rename_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, kind):
    path = tmp_path / "out"
    write_any(kind, path, 1)
    before = path.read_bytes()
    monkeypatch.setattr(files.os, "replace", raising(FULL))
    with pytest.raises(
        CheckpointError, match=r"cannot write .*/out: No space left on device; free space or choose another"
    ):
        write_any(kind, path, 2)
    assert os.listdir(tmp_path) == ["out"] and path.read_bytes() == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_full_at_the_sync_leaves_nothing(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(files.os, "fsync", raising(OSError(errno.EDQUOT, "Disk quota exceeded")))
    with pytest.raises(CheckpointError, match=r"cannot write .*/out: Disk quota exceeded"):
        write_any(kind, tmp_path / "out")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [FULL, SafetensorError("I/O error: No space left on device (os error 28)")], ids=type)
def test_a_disk_that_is_full_while_tensors_are_written_leaves_nothing(tmp_path, monkeypatch, error):
    def save_file(tensors, path, metadata=None):
        path.write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(files, "save_file", save_file)
    with pytest.raises(
        CheckpointError, match=r"cannot write .*/out: .*No space left on device.*; free space or choose another"
    ):
        write_tensors(tmp_path / "out", {"x": torch.ones(2)})
    assert os.listdir(tmp_path) == []


def test_the_cause_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "replace", raising(FULL))
    with pytest.raises(CheckpointError) as caught:
        write_text(tmp_path / "out", "x")
    assert caught.value.__cause__ is FULL


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_is_not_there_is_named(tmp_path, kind):
    with pytest.raises(CheckpointError, match=r"cannot write .*/nowhere/out: .*No such file or directory"):
        write_any(kind, tmp_path / "nowhere" / "out")


def test_the_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Data first, then the name, then the folder: any other order can show an empty file after a power cut."""
    steps = []
    real_fsync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(files.os, "fsync", lambda d: (steps.append("fsync"), real_fsync(d)))
    monkeypatch.setattr(files.os, "replace", lambda a, b: (steps.append("replace"), real_replace(a, b)))
    write_text(tmp_path / "out", "x")
    assert steps == ["fsync", "replace", "fsync"]


def test_text_that_cannot_be_encoded_leaves_nothing(tmp_path):
    """A folder name that is not UTF-8 reaches Python as lone surrogates, and with it the run record."""
    try:
        write_json(tmp_path / "out", {"name": os.fsdecode(b"mod\xe9le")})
    except (CheckpointError, UnicodeEncodeError):
        assert os.listdir(tmp_path) == []
    else:
        assert os.listdir(tmp_path) == ["out"]


def test_json_is_stable_readable_and_strict(tmp_path):
    path = tmp_path / "out.json"
    value = {"b": [1, 2.5, None], "a": "ü"}
    write_json(path, value)
    assert read_json(path) == value and list(read_json(path)) == ["b", "a"]
    assert "ü" in path.read_text(encoding="utf-8") and path.read_text().endswith("}\n")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"x": float("nan")})
    assert read_json(path) == value


@pytest.mark.parametrize("content", [None, b"{", b"\xff\xfe"])
def test_json_that_is_missing_or_damaged_is_named(tmp_path, content):
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"/run\.json is missing or damaged \(.*; copy or make it again"):
        read_json(path)
    with pytest.raises(
        CheckpointError, match=rf"/run\.json is missing or damaged \(.*; remove {tmp_path} and start again"
    ):
        read_json(path, tmp_path)


def test_tensors_come_back_with_their_metadata_whatever_their_memory(tmp_path):
    x = torch.arange(12.0, requires_grad=True).view(3, 4)
    tensors = {"transposed": x.T, "half": x[:, ::2].bfloat16(), "scalar": torch.tensor(3)}
    write_tensors(tmp_path / "out", tensors, {"count": "7"})
    back = load_file(tmp_path / "out")
    assert back.keys() == tensors.keys() and all(torch.equal(back[n], tensors[n]) for n in tensors)
    with safe_open(tmp_path / "out", framework="pt") as handle:
        assert handle.metadata() == {"count": "7"}


def test_the_same_tensors_give_the_same_bytes(tmp_path):
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    for name in ("one", "two"):
        write_tensors(tmp_path / name, tensors, {"count": "7"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_two_names_of_one_tensor_are_written_or_refused_for_what_it_is(tmp_path):
    """safetensors refuses shared memory; that has nothing to do with space on the disk."""
    x = torch.ones(3)
    try:
        write_tensors(tmp_path / "out", {"a": x, "b": x})
    except Exception as error:
        assert "free space" not in str(error)
    else:
        assert torch.equal(load_file(tmp_path / "out")["b"], x)


def test_an_output_must_be_new_and_its_parent_there(tmp_path):
    check_output(tmp_path / "new")
    with pytest.raises(CheckpointError, match=r"exists already; choose another folder or remove it"):
        check_output(tmp_path)
    with pytest.raises(CheckpointError, match=r"nowhere is not a folder; make it first"):
        check_output(tmp_path / "nowhere" / "new")
    (tmp_path / "file").write_text(json.dumps(1))
    with pytest.raises(CheckpointError, match=r"file is not a folder; make it first"):
        check_output(tmp_path / "file" / "new")


def test_a_name_that_no_file_can_have_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot use .*x: File name too long; choose another folder"):
        check_output(tmp_path / ("x" * 300))
    with pytest.raises(CheckpointError, match=r"cannot use .*: .*null (byte|character in path); choose another folder"):
        check_output(tmp_path / "a\0b")


def test_a_name_that_is_not_utf8_comes_back(tmp_path):
    name = os.fsdecode(b"mod\xe9le")
    write_json(tmp_path / "out", {"name": name})
    assert read_json(tmp_path / "out") == {"name": name}


@pytest.mark.parametrize("content", ["[1]", '{"x": NaN}', '{"x": ' * 100000, '{"x": ' + "9" * 5000 + "}"])
def test_json_that_is_no_object_of_numbers_and_strings_is_named(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"/run\.json is missing or damaged \("):
        read_json(tmp_path / "run.json")


@pytest.mark.skipif(os.name != "posix", reason="pipes with a name")
def test_a_pipe_in_the_place_of_a_record_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(CheckpointError, match=r"run\.json is missing or damaged \(it is not a file\)"):
        read_json(tmp_path / "run.json")


def test_a_name_that_safetensors_cannot_read_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"the name '.*mod\\udce9le' is not UTF-8; choose another one"):
        check_output(tmp_path / os.fsdecode(b"mod\xe9le"))
