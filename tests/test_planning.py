"""A plan is read off shapes; only who asks for a time runs the model, and then one block."""

import itertools

import pytest

import rankfold
from families import opened, tokens
from rankfold import planning
from rankfold.budgets import choices
from rankfold.calibration import backward
from rankfold.errors import OptionError


def refuse(*_, **__):
    pytest.fail("the model was run")


def test_a_plan_does_not_run_the_model(monkeypatch):
    monkeypatch.setattr(planning, "advance", refuse)
    monkeypatch.setattr(planning, "start", refuse)
    source = opened("llama")
    monkeypatch.setattr(type(source.model), "forward", refuse)
    plan = rankfold.plan(source, rankfold.MoDeGPT(sparsity=0.3, multiple=2))
    assert plan.seconds is None and plan.peak_memory_bytes > 0


@pytest.mark.parametrize(
    ("cls", "mode", "forwards"),
    [
        (rankfold.MoDeGPT, "sequential", 3.4),
        (rankfold.MoDeGPT, "one-pass", 2.6),
        (rankfold.Rankfold, "sequential", rankfold.Rankfold.forwards["sequential"]),
    ],
)
def test_the_time_is_that_of_one_block_for_all_blocks_and_tokens(monkeypatch, cls, mode, forwards):
    """With a clock by which every block forward takes 8, 5 and 6 seconds, and a batch of 64 windows of 32 tokens."""
    ticks = itertools.accumulate([0, 8, 1, 5, 1, 6])
    monkeypatch.setattr(planning.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(planning, "batch_tokens", lambda source: 2048)
    source = opened("llama")
    plan = rankfold.plan(source, cls(sparsity=0.3, multiple=2, allocation="uniform"))
    calibration = tokens(16).describe()
    timed = planning.timed(plan, source, calibration, mode)
    assert timed.seconds == pytest.approx(forwards * 3 * 5 * (16 * 32) / (64 * 32))
    assert timed.to_dict() == plan.to_dict() | {"seconds": timed.seconds}


def test_a_backward_pass_is_in_the_estimates(monkeypatch):
    """Of the time, over the windows it runs over; of the memory, what enters every block."""
    monkeypatch.setattr(planning, "batch_tokens", lambda source: 2048)
    monkeypatch.setattr(backward, "TOKENS", 4 * 32)
    source, calibration = opened("llama"), tokens(16).describe()
    seconds, memory = [], []
    for sensitivity in ("none", "gradient"):
        ticks = itertools.accumulate([0, 8, 1, 5, 1, 6])
        monkeypatch.setattr(planning.time, "perf_counter", lambda ticks=ticks: next(ticks))
        method = rankfold.MoDeGPT(sparsity=0.3, multiple=2, sensitivity=sensitivity)
        plan = planning.build_plan(
            source, method, planning.allocate_ranks(choices(source, method), method), {}, calibration
        )
        seconds.append(planning.timed(plan, source, calibration, "one-pass").seconds)
        long = calibration | {"samples": 1, "length": 2**20, "tokens": 2**20, "held_out": 0}
        memory.append(
            planning.build_plan(source, method, planning.allocate_ranks(choices(source, method), method), {}, long)
        )
    assert seconds[1] - seconds[0] == pytest.approx(backward.PASSES * 3 * 5 * (4 * 32) / (64 * 32))
    grown = memory[1].peak_memory_bytes - memory[0].peak_memory_bytes
    stream = 2**20 * 32 * 4  # bytes; of four of them, in front of 3 blocks and behind one, one is there anyway
    assert grown == pytest.approx(3 * stream, rel=0.02)


def test_the_time_of_an_unknown_mode_is_refused():
    source = opened("llama")
    plan = rankfold.plan(source, rankfold.MoDeGPT(sparsity=0.3, multiple=2))
    with pytest.raises(OptionError, match="mode must be sequential or one-pass, got 'turbo'"):
        planning.timed(plan, source, tokens().describe(), "turbo")
