"""What a run shows while it lasts: lines in a log, an estimate that goes by what was measured, no bars of others."""

import json
import re

import pytest
from tqdm import tqdm

from clocks import set_by_hand
from rankfold._utils import progress
from rankfold._utils.progress import Steps, count_steps, one_run, track, without_bars
from saved import save_text, save_tiny
from warm import RANKFOLD, python

LINES = """
import sys, rankfold._utils.progress
rankfold._utils.progress.LINE_SECONDS = 0.0
"""
UNDRAWN = """
from rankfold.comparison.report import page, plots
page.drawn = lambda picture, *width: plots.DrawnPicture(picture, b"", "", "")
"""


@pytest.fixture
def stop(monkeypatch):
    """Moves the clock on while the process is stopped."""
    return set_by_hand(monkeypatch, progress, "monotonic")


@pytest.fixture
def clock(monkeypatch, stop):
    """Moves the clock on while two threads work."""
    work = set_by_hand(monkeypatch, progress, "process_time")

    def wait(seconds: float) -> None:
        stop(seconds)
        work(2 * seconds)

    return wait


def test_a_log_gets_a_line_a_minute_with_what_is_done_left_and_known(clock, capsys):
    known = iter(range(1, 100))
    for _ in track(range(12), "compressing", note=lambda: f"error {next(known)}"):
        clock(25)
    assert capsys.readouterr().err.splitlines() == [
        "compressing: 3 of 12, 75 s so far, about 4 min left, error 3",
        "compressing: 6 of 12, 2 min so far, about 2 min left, error 6",
        "compressing: 9 of 12, 4 min so far, about 75 s left, error 9",
        "compressing: 12 of 12, 5 min so far, error 12",
    ]


def test_a_log_gets_one_line_a_step_where_steps_take_longer(clock, capsys):
    for _ in track(range(3), "calibrating"):
        clock(4000)
    assert capsys.readouterr().err.splitlines() == [
        "calibrating: 1 of 3, 1 h 07 min so far, about 2 h 13 min left",
        "calibrating: 2 of 3, 2 h 13 min so far, about 1 h 07 min left",
        "calibrating: 3 of 3, 3 h 20 min so far",
    ]


def test_steps_inside_others_share_a_line_and_a_minute(clock, capsys):
    for _ in track(["a", "b"], "comparing"):
        for _ in track(range(2), "evaluating"):
            clock(45)
    assert capsys.readouterr().err.splitlines() == [
        "comparing: 0 of 2, 2 min so far; evaluating: 2 of 2, 2 min so far",
        "comparing: 1 of 2, 3 min so far, about 0 s left; evaluating: 2 of 2, 2 min so far",
    ]


def test_short_works_of_one_run_get_lines_too(clock, capsys):
    """Rounds of a search, each below a minute."""
    with one_run():
        for number in range(4):
            for _ in track(range(1), f"round {number}"):
                clock(40)
    assert capsys.readouterr().err.splitlines() == ["round 1: 1 of 1, 40 s so far", "round 3: 1 of 1, 40 s so far"]


def test_a_short_run_writes_nothing(clock, capsys):
    for _ in range(3):
        for _ in track(range(5), "evaluating"):
            clock(10)
    assert capsys.readouterr().err == ""


def test_the_estimate_forgets_steps_that_were_done_before(clock):
    """Of a run that goes on, where the first blocks are only read."""
    steps = Steps("compressing", 20)
    for seconds in [1] * 5 + [100] * 5:
        clock(seconds)
        steps.advance()
    assert steps.seconds_left == 1000
    clock(30)
    assert steps.seconds_left == 970
    clock(3000)
    assert steps.seconds_left == 0


def test_the_estimate_leaves_out_a_pause(clock, stop):
    """Of a process that was stopped for a night, in a step that is done and in the one under way."""
    steps = Steps("compressing", 10)
    for pause in (0, 30_000, 0):
        clock(100)
        stop(pause)
        steps.advance()
        clock(10)
    assert steps.seconds_left == pytest.approx(7 * 330 / 3 - 10)
    stop(30_000)
    assert steps.seconds_left == pytest.approx(7 * 330 / 3 - 10)


def test_the_estimate_knows_that_steps_differ(clock):
    steps = Steps("measuring", 4, costs=[1, 2, 3, 4])
    assert steps.seconds_left is None
    clock(10)
    steps.advance()
    assert steps.seconds_left == 90


def test_without_a_total_there_is_no_estimate(clock, capsys):
    with count_steps("scoring") as advance:
        clock(61)
        advance()
    assert capsys.readouterr().err == "scoring: 1, 61 s so far\n"


def test_a_run_that_fails_leaves_no_line_behind(clock, capsys):
    with pytest.raises(ValueError), count_steps("failing", 2):
        raise ValueError
    for _ in track(range(1), "next"):
        clock(61)
    assert capsys.readouterr().err == "next: 1 of 1, 61 s so far\n"


def test_bars_of_others_are_kept_away_whatever_they_ask_for(capsys):
    with without_bars():
        assert [*tqdm(range(3), disable=False)] == [0, 1, 2]
    assert capsys.readouterr().err == ""
    assert [*tqdm(range(3))] == [0, 1, 2]
    assert "3/3" in capsys.readouterr().err


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("progress")
    save_tiny(folder / "model")
    save_text(folder / "text.txt")
    return folder


TEXT = "--calibration text.txt --num-samples 8 --max-length 64 --device cpu --json"
COMMANDS = {
    f"compress model -o small --sparsity 0.3 --rank-multiple 2 {TEXT}": (
        r"measuring sensitivity: 4 of 4",
        r"compressing: 2 of 4, \d+ s so far, about \d+ s left, error of the stream on held-out samples \d\.\d{3}",
    ),
    f"calibrate model -o moments {TEXT}": (r"calibrating: 1 of 4, \d+ s so far, about \d+ s left",),
    f"plan model --sparsity 0.3 --rank-multiple 2 {TEXT}": (r"measuring sensitivity: 3 of 4",),
    "evaluate model --text text.txt --max-length 64 --device cpu --json": (
        r"evaluating: \d+ of \d+, .*perplexity \d+\.\d\d",
    ),
    "compare model -o grid --methods modegpt:rank_multiple=2 --sparsities 0.2,0.3 "
    f"--text text.txt --text-length 64 {TEXT}": (
        r"comparing: 1 of 2, .*; compressing: 4 of 4",
        r"comparing: 0 of 2, .*; calibrating: 2 of 4",
    ),
}


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.split()[0])
def test_a_long_command_writes_lines_into_a_pipe_and_its_json_alone_to_stdout(place, line):
    is_drawn = line.startswith("compare")
    if is_drawn:
        pytest.importorskip("matplotlib", reason="compare draws with matplotlib, extra 'report'")
    done = python(LINES + UNDRAWN * is_drawn + RANKFOLD, *line.split(), cwd=place)
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    for pattern in COMMANDS[line]:
        assert re.search(f"^{pattern}", done.stderr, re.MULTILINE), (pattern, done.stderr)
    assert "\r" not in done.stderr and "%|" not in done.stderr
