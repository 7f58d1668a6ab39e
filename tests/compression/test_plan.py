"""A plan is read off shapes: nothing here runs the model."""

import pytest

import rankfold
from families import opened, tokens
from rankfold.calibration import backward, runner
from rankfold.compression import plan as planning
from rankfold.compression.budget import rank_options


def refuse(*_, **__):
    pytest.fail("the model was run")


def test_a_plan_does_not_run_the_model(monkeypatch):
    monkeypatch.setattr(runner, "_forward", refuse)
    source = opened("llama")
    monkeypatch.setattr(type(source.model), "forward", refuse)
    plan = rankfold.plan(source, method=rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2))
    assert plan.seconds is None and plan.peak_memory_bytes > 0


def test_a_backward_pass_is_in_the_estimate_of_memory(monkeypatch):
    """Of the memory, what enters every block."""
    monkeypatch.setattr(backward, "TOKENS", 4 * 32)
    source, calibration = opened("llama"), tokens(16).describe()
    memory = []
    for weighting in ("none", "fisher"):
        method = rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2, output_weighting=weighting)
        long = calibration | {"num_samples": 1, "max_length": 2**20, "tokens": 2**20, "held_out": 0}
        memory.append(
            planning.build_plan(source, method, planning.allocate_ranks(rank_options(source, method), method), {}, long)
        )
    grown = memory[1].peak_memory_bytes - memory[0].peak_memory_bytes
    stream = 2**20 * 32 * 4  # bytes; of four of them, in front of 3 blocks and behind one, one is there anyway
    assert grown == pytest.approx(3 * stream, rel=0.02)
