"""A plan is read off shapes: nothing here runs the model."""

import io

import pytest
from rich.console import Console

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
    stream = 2**20 * 32 * 4  # bytes; of four of them, before 3 blocks and after one, one is there anyway
    assert grown == pytest.approx(3 * stream, rel=0.02)


def test_the_estimate_of_memory_says_what_it_leaves_out():
    """Tokenising a text of 1 MB takes more than compressing a small model, and nothing of it is counted."""
    plan = rankfold.plan(opened("llama"), method=rankfold.MoDeGPT(sparsity=0.3, rank_multiple=2))
    console = Console(file=io.StringIO(), width=400)
    console.print(plan.summary())
    assert "peak memory without program and tokenising (estimate)" in console.file.getvalue()


def test_codes_in_a_junction_that_rounds_badly_are_warned_of():
    """The others, more bits and no codes are not."""

    def notes(**options) -> str:
        plan = rankfold.plan(opened("llama"), method=rankfold.LatentLLM(sparsity=0.3, rank_multiple=2, **options))
        console = Console(file=io.StringIO(), width=400)
        console.print(plan.summary())
        return console.file.getvalue()

    for junction in ("lu", "block_identity_left"):
        assert f"Codes of 4 bits lose much more in junction={junction}" in notes(bits=4, junction=junction)
    for options in ({"bits": 5, "junction": "lu"}, {"junction": "lu"}, {"bits": 4}, {"bits": 4, "junction": "right"}):
        assert "Codes of" not in notes(**options)


@pytest.mark.parametrize("modules", [("qk", "vo"), ("mlp", "qk", "vo")])
def test_more_than_was_asked_for_is_explained_by_the_width_of_heads(modules):
    method = rankfold.MoDeGPT(sparsity=0.02, head_dim=4, target="stock", modules=modules)
    plan = rankfold.plan(opened("llama"), method=method)
    removed = plan.budget["removed"] / plan.budget["counted"]
    assert (
        f"{removed:.1%} is removed, more than the 2.0% asked for: the width of heads that was asked for takes"
        in str(plan.budget["excess"])
    )
