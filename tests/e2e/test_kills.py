"""Killed at every single file operation and started again: the same bytes, and nothing left behind."""

import json
import os
import shutil

import pytest

import rankfold
from families import tokens
from kills import State, kill_everywhere, read_state, write_state
from rankfold import MoDeGPT, Rankfold
from rankfold.errors import CheckpointError
from rankfold.methods import SparseGPT
from rankfold.methods.base import NarrowingMethod
from rankfold.report.record import records_of
from saved import save_tiny
from tiny_encoders import samples_of, tiny_encoder

RUNS = {
    "default": (Rankfold, {}, {}),
    "sequential": (MoDeGPT, {}, {}),
    "one-pass": (MoDeGPT, {}, {"mode": "one-pass"}),
    "gradient": (MoDeGPT, {"output_weighting": "fisher"}, {"mode": "one-pass"}),
    "one-pass, influence": (MoDeGPT, {"allocation": "influence"}, {"mode": "one-pass"}),
    "two of four": (SparseGPT, {"sparsity": 0.5}, {}),
}
# Kinds of which `make test` kills at every second state. The others are in the matrix, and so is "one-pass", which
# writes nothing that the two others of one pass do not write.
HALVED = ("default", "gradient", "one-pass, influence", "two of four")
KILLS = [
    ("sequential", 1, 0),
    *((kind, 2, 0) for kind in HALVED),
    *(pytest.param(kind, 2, 1, marks=pytest.mark.matrix) for kind in HALVED),
    pytest.param("one-pass", 1, 0, marks=pytest.mark.matrix),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    source = rankfold.open_model(save_tiny(tmp_path_factory.mktemp("kills") / "model", blocks=2), device="cpu")
    assert source.tokenizer and source.fingerprint
    return source


def comparable(state: State) -> State:
    """Without the times and the memory of a run."""
    if (name := "out/rankfold.json") not in state:
        return state
    record = json.loads(state[name])
    for one in records_of(record):
        one.pop("run")
    return state | {name: json.dumps(record).encode()}


def check_all_kills(tmp_path, monkeypatch, work, every: int = 1, first: int = 0, is_short: bool = False) -> None:
    """``work(output)`` after every kill of it, or every so many of them from one on, gives what it gives without.

    Where the output has its name already the work is done, and doing it again may be refused. ``is_short``: not every
    state of temporary files.
    """
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # slow, and no test can cut the power
    (tmp_path / "whole").mkdir()
    kills = kill_everywhere(tmp_path / "whole", lambda: work(tmp_path / "whole" / "out"), monkeypatch)
    whole = comparable(read_state(tmp_path / "whole"))
    assert {name.split("/")[0] for name in whole} == {"out"}
    states = kills.by_names() if is_short else [(dict(items), what) for items, what in kills.states.items()]
    for state, operation in states[first::every]:
        place = tmp_path / "killed"
        write_state(place, state)
        try:
            work(place / "out")
        except CheckpointError as error:
            assert "out exists already" in str(error), (operation, error)
            (place / ".out.rankfold.lock").unlink(missing_ok=True)
        assert comparable(read_state(place)) == whole, operation
        shutil.rmtree(place)
    print(f"{kills.operations} operations, {len(states)} of {len(kills.states)} states on the disk")
    assert kills.operations > 3 * len(whole)


@pytest.mark.parametrize("kind, every, first", KILLS)
def test_a_compression_killed_anywhere_ends_in_the_same_bytes(tmp_path, monkeypatch, source, kind, every, first):
    """One kind meets every state of temporary files; the others write theirs by the same function."""
    cls, options, how = RUNS[kind]
    steps = {"rank_multiple": 2} if issubclass(cls, NarrowingMethod) else {}
    method = cls(**{"sparsity": 0.3} | steps | options)
    check_all_kills(
        tmp_path,
        monkeypatch,
        lambda out: rankfold.compress(source, method=method, calibration=tokens(4), output=out, **how).output,
        every,
        first,
        is_short=kind != "sequential",
    )


def test_two_parts_killed_anywhere_end_in_the_same_bytes(tmp_path, monkeypatch):
    """Of all kills every seventh, to save time."""
    (tmp_path / "model").mkdir()
    tiny_encoder("clip-vision").save_pretrained(tmp_path / "model")
    parts, method = [], MoDeGPT(sparsity=0.3, rank_multiple=2)
    for part in ("vision", "language"):
        source = rankfold.open_model(tmp_path / "model", device="cpu", component=part)
        parts.append((source, method, samples_of(source)))
    (tmp_path / "runs").mkdir()
    check_all_kills(
        tmp_path / "runs",
        monkeypatch,
        lambda out: rankfold.compress_components(parts, out).output,
        every=7,
        is_short=True,
    )


def test_a_calibration_killed_anywhere_ends_in_the_same_bytes(tmp_path, monkeypatch, source):
    check_all_kills(tmp_path, monkeypatch, lambda out: rankfold.calibrate(source, tokens(4), out))


def test_a_save_killed_anywhere_ends_in_the_same_bytes(tmp_path, monkeypatch, source):
    model = rankfold.compress(source, method=MoDeGPT(sparsity=0.3, rank_multiple=2), calibration=tokens(4)).model
    check_all_kills(tmp_path, monkeypatch, lambda out: rankfold.save(model, out, source.tokenizer))


def test_a_link_to_nothing_is_in_the_way(tmp_path, source):
    (tmp_path / "out").symlink_to(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="out exists already; choose another folder or remove it"):
        rankfold.compress(source, method=MoDeGPT(rank_multiple=2), calibration=tokens(4), output=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["file", "folder", "link to nothing"])
def test_an_output_that_appears_meanwhile_costs_nothing(tmp_path, monkeypatch, source, kind):
    """The checkpoint is whole in the partial folder; when the way is free the same command only renames it."""
    out, decompose = tmp_path / "out", MoDeGPT.decompose

    def appear(self, *args):
        if not os.path.lexists(out):
            {"file": out.touch, "folder": out.mkdir, "link to nothing": lambda: out.symlink_to("nothing")}[kind]()
        return decompose(self, *args)

    monkeypatch.setattr(MoDeGPT, "decompose", appear)
    with pytest.raises(
        CheckpointError, match=r"out appeared while the run was under way; the finished .*partial: rename"
    ):
        rankfold.compress(source, method=MoDeGPT(rank_multiple=2), calibration=tokens(4), output=out)
    out.rmdir() if kind == "folder" else out.unlink()
    monkeypatch.setattr(MoDeGPT, "decompose", None)
    with pytest.raises(CheckpointError, match="is an unfinished run of another configuration"):
        rankfold.compress(source, method=MoDeGPT(rank_multiple=4), calibration=tokens(4), output=out)
    rankfold.compress(source, method=MoDeGPT(rank_multiple=2), calibration=tokens(4), output=out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and rankfold.load(out)


def test_two_runs_do_not_write_one_output(tmp_path, monkeypatch, source):
    asked, decompose = [], MoDeGPT.decompose

    def again(self, *args):
        if not asked:
            asked.append(True)
            with pytest.raises(
                CheckpointError, match=rf"out is being written by process {os.getpid()} on .*; wait until"
            ):
                rankfold.compress(
                    source, method=MoDeGPT(rank_multiple=2), calibration=tokens(4), output=tmp_path / "out"
                )
            with pytest.raises(CheckpointError, match="out is being written by process"):
                rankfold.save(source.model, tmp_path / "out")
        return decompose(self, *args)

    monkeypatch.setattr(MoDeGPT, "decompose", again)
    rankfold.compress(source, method=MoDeGPT(rank_multiple=2), calibration=tokens(4), output=tmp_path / "out")
    assert asked and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_lock_that_says_nothing_yet_is_still_a_lock(tmp_path, source):
    from rankfold._utils.locking import lock_of, locked

    with locked(lock_of(tmp_path / "out"), tmp_path / "out"):
        lock_of(tmp_path / "out").write_text("")
        with pytest.raises(CheckpointError, match="out is being written by another process; wait until it is done"):
            rankfold.compress(source, method=MoDeGPT(rank_multiple=2), calibration=tokens(4), output=tmp_path / "out")


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "error", [FULL, Exception("No space left on device (os error 28)")], ids=["OSError", "tokenizers"]
)
def test_a_disk_that_is_full_while_the_tokenizer_is_written_is_one_line(tmp_path, monkeypatch, source, error):
    method = MoDeGPT(sparsity=0.3, rank_multiple=2)
    model = rankfold.compress(source, method=method, calibration=tokens(4)).model

    def full(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(source.tokenizer, "save_pretrained", full)
        with pytest.raises(
            CheckpointError, match=r"cannot write .*: No space left on device.*; free space or choose another"
        ):
            rankfold.compress(source, method=method, calibration=tokens(4), output=tmp_path / "out")
        with pytest.raises(
            CheckpointError, match=r"cannot write .*: No space left on device.*; free space or choose another"
        ):
            rankfold.save(model, tmp_path / "saved", source.tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    rankfold.compress(source, method=method, calibration=tokens(4), output=tmp_path / "out")
    assert rankfold.load(tmp_path / "out")


def test_an_error_of_the_program_is_not_taken_for_a_full_disk(tmp_path, monkeypatch, source):
    monkeypatch.setattr(source.tokenizer, "save_pretrained", lambda folder: {}["bug"])
    with pytest.raises(KeyError, match="bug"):
        rankfold.compress(source, method=MoDeGPT(rank_multiple=2), calibration=tokens(4), output=tmp_path / "out")


def test_a_damaged_file_of_an_unfinished_run_names_the_folder_to_remove(tmp_path, monkeypatch, source, subtests):
    def again():
        method = MoDeGPT(sparsity=0.3, rank_multiple=2)
        return rankfold.compress(source, method=method, calibration=tokens(4), output=tmp_path / "out")

    partial, decompose = tmp_path / "out.partial", MoDeGPT.decompose

    def killed(self, view, *args):
        if view.index == 1:
            raise KeyboardInterrupt
        return decompose(self, view, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MoDeGPT, "decompose", killed)
        again()
    found = sorted(partial.glob("*.json"))
    assert {"run.json", "block-00000.json"} <= {path.name for path in found}
    for path in found:
        with subtests.test(path.name):
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            with pytest.raises(
                CheckpointError, match=rf"{path.name} is .*damaged .*; remove \S+out\.partial and start"
            ):
                again()
            path.write_bytes(content)
    shutil.rmtree(partial)
    assert again().output


def test_what_is_not_a_run_is_left_alone(tmp_path, source):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"out\.partial exists and is not an unfinished run; remove it or choose"):
        rankfold.compress(source, method=MoDeGPT(rank_multiple=2), calibration=tokens(4), output=tmp_path / "out")
    assert read_state(tmp_path) == {"out.partial": None, "out.partial/thesis.txt": b"mine"}
