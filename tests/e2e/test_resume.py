"""Kill -9 at random moments, start again, end in the same bytes."""

import json
import os
import random
import signal
import time

import pytest
import torch

import rankfold
from kills import read_state
from rankfold import MoDeGPT
from rankfold.errors import CheckpointError, NumericsError
from saved import save_text, save_tiny
from warm import RANKFOLD, start

OPTIONS = "--rank-multiple 2 --calibration text.txt --num-samples 8 --max-length 32 --device cpu"


def started(folder, output: str, extra: str):
    return start(RANKFOLD, "compress", "model", "-o", output, *OPTIONS.split(), *extra.split(), cwd=folder)


def finish(folder, output: str, extra: str) -> None:
    process = started(folder, output, extra)
    process.join()
    assert process.exitcode == 0


def contents(folder) -> dict[str, bytes]:
    """All bytes of a checkpoint; the times and memory of the run do not count."""
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    record = json.loads(files.pop("rankfold.json"))
    record.pop("run")
    text = json.dumps(record).replace("killed", "whole")
    return {**files, "README.md": files["README.md"].replace(b"killed", b"whole"), "rankfold.json": text.encode()}


@pytest.mark.parametrize("extra", ["", "--method modegpt --mode one-pass --allocation influence"])
def test_killed_runs_end_in_the_same_bytes(tmp_path, extra):
    save_tiny(tmp_path / "model", blocks=8)
    save_text(tmp_path / "text.txt")
    finish(tmp_path, "whole", extra)
    wait, kills = random.Random(7), 0
    for _ in range(12):
        process = started(tmp_path, "killed", extra)
        partial = tmp_path / "killed.partial"
        before = _progress(partial)
        while process.is_alive() and _progress(partial) < before + 2 + kills:
            time.sleep(0.005)
        time.sleep(wait.uniform(0, 0.05))
        if not process.is_alive():
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        assert not (tmp_path / "killed").exists(), "a killed run left something that looks finished"
        assert not (partial / "config.json").exists() or not (partial / "rankfold.json").exists()
        if kills == 2:
            finish(tmp_path, "killed", extra)
            break
    assert kills == 2
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def _progress(partial) -> int:
    return sum(1 for _ in partial.rglob("block-*")) if partial.exists() else 0


def test_an_unfinished_run_of_another_configuration_is_refused(tmp_path, monkeypatch):
    save_tiny(tmp_path / "model")
    save_text(tmp_path / "text.txt")
    source = rankfold.open_model(tmp_path / "model", device="cpu")
    tokens = rankfold.load_calibration(str(tmp_path / "text.txt"), source, num_samples=4, max_length=32)
    original = MoDeGPT.decompose

    def fail_at_two(self, view, *args):
        if view.index == 2:
            raise KeyboardInterrupt
        return original(self, view, *args)

    monkeypatch.setattr(MoDeGPT, "decompose", fail_at_two)
    with pytest.raises(KeyboardInterrupt):
        rankfold.compress(source, method=MoDeGPT(rank_multiple=2), calibration=tokens, output=tmp_path / "out")
    monkeypatch.setattr(MoDeGPT, "decompose", original)
    assert (tmp_path / "out.partial").exists() and not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="unfinished run of another configuration"):
        rankfold.compress(
            source, method=MoDeGPT(sparsity=0.2, rank_multiple=2), calibration=tokens, output=tmp_path / "out"
        )
    rankfold.compress(source, method=MoDeGPT(rank_multiple=2), calibration=tokens, output=tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_a_full_disk_is_one_line_and_the_run_can_go_on(tmp_path, monkeypatch):
    save_tiny(tmp_path / "model")
    save_text(tmp_path / "text.txt")
    source = rankfold.open_model(tmp_path / "model", device="cpu")
    tokens = rankfold.load_calibration(str(tmp_path / "text.txt"), source, num_samples=4, max_length=32)
    from rankfold._utils import files

    real, calls = files.save_file, []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(CheckpointError, match="cannot write .*No space left on device; free space"):
        rankfold.compress(source, method=MoDeGPT(rank_multiple=2), calibration=tokens, output=tmp_path / "out")
    assert not list(tmp_path.rglob("*.tmp"))
    rankfold.compress(source, method=MoDeGPT(rank_multiple=2), calibration=tokens, output=tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("error", [NumericsError("block 2"), MemoryError(), KeyError("a bug")], ids=repr)
@pytest.mark.parametrize("at", ["block 2", "the end"])
def test_a_failed_run_goes_on_and_is_never_replaced(tmp_path, monkeypatch, at, error):
    """As after a kill: the same configuration goes on, and another one is told where the run is and what to do."""
    save_tiny(tmp_path / "model")
    save_text(tmp_path / "text.txt")
    source = rankfold.open_model(tmp_path / "model", device="cpu")
    tokens = rankfold.load_calibration(str(tmp_path / "text.txt"), source, num_samples=4, max_length=32)
    original, done = MoDeGPT.decompose, []

    def decompose(self, view, moments, ranks, *args):
        if at == "block 2" and view.index == 2:
            raise error
        done.append((view.index, *ranks))
        return original(self, view, moments, ranks, *args)

    def fail(*args, **kwargs):
        raise error

    one, other = MoDeGPT(rank_multiple=2), MoDeGPT(sparsity=0.2, rank_multiple=2)
    with monkeypatch.context() as patch:
        patch.setattr(MoDeGPT, "decompose", decompose)
        if at == "the end":
            patch.setattr("rankfold.checkpoint.run.write_around", fail)
        for _ in range(2):
            with pytest.raises(type(error)):
                rankfold.compress(source, method=one, calibration=tokens, output=tmp_path / "out")
        assert len(done) == len(set(done)), "what was done was done again"
        assert not (tmp_path / "out").exists()
    before = read_state(tmp_path / "out.partial")
    with pytest.raises(
        CheckpointError,
        match=r"out\.partial is an unfinished run of another configuration \(its options\.sparsity is 0\.3, "
        r"not 0\.2\); repeat "
        "that one to go on with it, remove the folder to start anew, or choose another output$",
    ):
        rankfold.compress(source, method=other, calibration=tokens, output=tmp_path / "out")
    assert read_state(tmp_path / "out.partial") == before
    rankfold.compress(source, method=one, calibration=tokens, output=tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {"model", "text.txt", "out"}
    weights = rankfold.load(tmp_path / "out", device="cpu").state_dict()
    whole = rankfold.compress(source, method=one, calibration=tokens).model.state_dict()
    assert weights.keys() == whole.keys() and all(torch.equal(weights[key], whole[key]) for key in whole)


def test_a_run_that_failed_before_anything_was_done_leaves_nothing(tmp_path, monkeypatch):
    save_tiny(tmp_path / "model")
    save_text(tmp_path / "text.txt")
    source = rankfold.open_model(tmp_path / "model", device="cpu")
    tokens = rankfold.load_calibration(str(tmp_path / "text.txt"), source, num_samples=4, max_length=32)
    monkeypatch.setattr(MoDeGPT, "decompose", lambda *args: {}["a bug"])
    with pytest.raises(KeyError):
        rankfold.compress(source, method=MoDeGPT(rank_multiple=2), calibration=tokens, output=tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
