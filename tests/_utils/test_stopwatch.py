"""The seconds of a run by part: each counted once, all of them together the total."""

import time

import pytest

import rankfold
from clocks import set_by_hand
from families import opened, tokens
from rankfold._utils import stopwatch
from rankfold._utils.stopwatch import OTHER, PARTS, PROBES, time_spent, timed_run
from rankfold.report.record import read_record


@pytest.fixture
def clock(monkeypatch):
    return set_by_hand(monkeypatch, stopwatch, "perf_counter")


def test_a_second_counts_to_the_innermost_part(clock):
    with timed_run() as run:
        clock(1)
        with time_spent("decomposition"):
            clock(2)
            with time_spent("forward"):
                clock(4)
                with time_spent("moments"):
                    clock(8)
                clock(16)
            clock(32)
        with time_spent("forward"):
            clock(64)
        with time_spent(PROBES):
            clock(128)
            with time_spent("forward"):  # of probe texts, which count as a whole
                clock(256)
    expected = {"reading": 0, "forward": 84, "moments": 8, "decomposition": 34, "writing": 0, "other": 1, PROBES: 384}
    assert run.seconds() == {"total": 511} | expected


def test_a_part_that_fails_ends_there(clock):
    with timed_run() as run:
        with pytest.raises(ValueError), time_spent("reading"):
            clock(1)
            raise ValueError
        clock(2)
    assert (run.seconds()["reading"], run.seconds()["other"]) == (1, 2)


def test_without_a_run_nothing_is_counted():
    with time_spent("reading"):
        pass


def test_seconds_of_a_killed_run_are_those_of_all_its_processes(clock, tmp_path, monkeypatch):
    """On a clock that moves by a second in every step of a block; that of a block which a kill cut short is lost."""
    decompose = rankfold.MoDeGPT.decompose

    def compress(killed_at=None):
        def a_second_later(self, view, *args):
            clock(1)
            if view.index == killed_at:
                raise KeyboardInterrupt
            return decompose(self, view, *args)

        monkeypatch.setattr(rankfold.MoDeGPT, "decompose", a_second_later)
        method = rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2)
        return rankfold.compress(opened("llama"), method=method, calibration=tokens(16), output=tmp_path / "small")

    for block in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            compress(block)
    seconds = compress().record["run"]["seconds"]
    assert seconds == read_record(tmp_path / "small")["run"]["seconds"]
    assert seconds["total"] == seconds["decomposition"] == 6  # of two steps in each of three blocks
    assert not (tmp_path / "small" / "seconds.json").exists()


@pytest.mark.parametrize("mode", ["sequential", "one-pass"])
def test_a_record_tells_where_the_time_went(tmp_path, mode):
    begin = time.perf_counter()
    method = rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2)
    rankfold.compress(opened("llama"), method=method, calibration=tokens(16), output=tmp_path / "small", mode=mode)
    took, seconds = time.perf_counter() - begin, read_record(tmp_path / "small")["run"]["seconds"]
    total = seconds.pop("total")
    assert set(seconds) == {*PARTS, OTHER}
    assert all(value > 0 for name, value in seconds.items() if name != PROBES)  # this model has no tokenizer
    assert sum(seconds.values()) == pytest.approx(total, abs=1e-6)
    assert 0 < total <= took


def test_each_kind_of_work_is_counted_to_its_part(clock, tmp_path, monkeypatch):
    """On a clock that stands still but for half a second in one of them."""
    from rankfold.calibration import observers, runner
    from rankfold.compression import block as stages
    from rankfold.compression import output as destination
    from rankfold.models.dense_model import DenseModel

    slow = {
        "reading": (DenseModel, "inv_freq"),
        "forward": (runner, "_batched"),
        "moments": (observers.VectorMoment, "add"),
        "decomposition": (stages, "moved"),
        "writing": (destination.BlockFiles, "save_block"),
    }
    for part, (owner, name) in slow.items():
        with monkeypatch.context() as patch:
            work, slept = getattr(owner, name), []

            def late(*args, work=work, slept=slept, **options):
                if not slept:
                    slept.append(0.5)
                    clock(0.5)
                return work(*args, **options)

            patch.setattr(owner, name, late)
            folder = tmp_path / part
            rankfold.compress(
                opened("llama"),
                method=rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2),
                calibration=tokens(16),
                output=folder,
            )
        seconds = read_record(folder)["run"]["seconds"]
        assert slept and {name for name, value in seconds.items() if value} == {"total", part}, (part, seconds)
