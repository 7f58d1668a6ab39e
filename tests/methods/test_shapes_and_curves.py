"""What is only timed has the shapes of what is written, and a curve says the errors that modules then have."""

from dataclasses import replace

import pytest
import torch

import rankfold
from families import named, opened, tokens
from rankfold import MoDeGPT, Rankfold
from rankfold.compression.budget import rank_options
from rankfold.linalg import nystrom

RANKS = [{"mlp": 20}, {"qk": 4}, {"vo": 6}, {"mlp": 20, "qk": 4, "vo": 6}]


@pytest.mark.parametrize("ranks", RANKS, ids=lambda ranks: "-".join(ranks))
@pytest.mark.parametrize("family", ["llama-bias", "phi3", "gpt2", "opt", "olmo2"])
def test_what_is_timed_has_the_shapes_of_what_is_written(family, ranks):
    source = opened(family)
    method = MoDeGPT(
        rank_multiple=2, bias_refit=False, modules=named(family)
    )  # a refit takes the biases of values away
    view, moments = source.block(0), rankfold.calibrate(source, tokens())[0]
    (stage,) = method.stages(view, ranks)
    written = stage.decompose(view, moments, lambda: None)
    timed = method.truncated(view, ranks)
    assert timed.modules == written.modules
    shapes, wanted = ({name: t.shape for name, t in result.state.items()} for result in (timed, written))
    assert shapes == wanted
    assert all(t.is_contiguous() and t.isfinite().all() for t in timed.state.values())


def test_what_is_timed_is_the_first_units_and_dimensions():
    """Rotary pairs stay whole: dimension p turns with p + N / 2, of which the compressed head keeps the first R / 2."""
    view = opened("llama-bias").block(1)
    state = MoDeGPT(rank_multiple=2).truncated(view, {"mlp": 20, "vo": 6}).state
    attention, mlp = view.module.self_attn, view.module.mlp
    heads = [attention.o_proj.weight[:, 8 * head : 8 * head + 6] for head in range(4)]
    assert torch.equal(state["self_attn.o_proj.weight"], torch.cat(heads, 1))
    assert torch.equal(state["self_attn.o_proj.bias"], attention.o_proj.bias)
    assert torch.equal(state["mlp.down_proj.weight"], mlp.down_proj.weight[:, :20])
    assert torch.equal(state["mlp.gate_proj.bias"], mlp.gate_proj.bias[:20])


CURVED = {
    "modegpt": MoDeGPT(rank_multiple=2),
    "leverage": MoDeGPT(rank_multiple=2, selection="leverage"),
    "rankfold": Rankfold(rank_multiple=2, residual_correction=False),
}


@pytest.mark.parametrize("method", CURVED.values(), ids=CURVED)
@pytest.mark.parametrize("family", ["llama-bias", "opt", "qwen3"])
def test_a_curve_says_the_errors_that_modules_then_have(family, method):
    source, method = opened(family), replace(method, modules=named(family))
    view = source.block(1)
    units = [unit for unit in rank_options(source, method).units if unit.block == 1]
    moments = rankfold.calibrate(source, tokens(), statistics=method.statistics(view))[1]
    assert {unit.module for unit in units} == {"qk", "vo", "mlp"}
    for unit in units:
        least = unit.ranks[len(unit.ranks) // 2]
        curve, _ = method.curve(view, moments, unit, least)
        assert sorted(curve) == [rank for rank in unit.ranks if rank >= least]
        assert curve[unit.ranks[-1]] == 0.0
        stages = method.stages(view, {unit.module: least})
        report = stages[0].decompose(view, moments, lambda: None).reports[unit.module]
        error = report.get("expected_error", report["relative_error"])  # of norms too
        # what elimination counts has the ridge in it
        assert curve[least] == pytest.approx(error**2, rel=0.02 if unit.module == "mlp" else 1e-6), unit.module


@pytest.mark.parametrize("selection", ["obs", "leverage"])
def test_a_curve_says_the_error_that_experts_then_have(selection):
    source, method = opened("mixtral"), MoDeGPT(modules=["experts"], selection=selection)
    view = source.block(1)
    (unit,) = [unit for unit in rank_options(source, method).units if (unit.block, unit.module) == (1, "experts")]
    moments = rankfold.calibrate(source, tokens(), statistics=method.statistics(view))[1]
    least = unit.ranks[len(unit.ranks) // 2]
    curve, _ = method.curve(view, moments, unit, least)
    report = method.stages(view, {"experts": least})[0].decompose(view, moments, lambda: None).reports["experts"]
    assert curve[least] == pytest.approx(report["relative_error"] ** 2, rel=0.02)


@pytest.mark.parametrize("method", [MoDeGPT(rank_multiple=2), Rankfold(rank_multiple=2, residual_correction=False)])
def test_all_ranks_of_values_are_of_one_decomposition(method, monkeypatch):
    source, calls, svd = opened("llama"), [], torch.linalg.svd
    view = source.block(1)
    (unit,) = [unit for unit in rank_options(source, method).units if (unit.block, unit.module) == (1, "vo")]
    moments = rankfold.calibrate(source, tokens(), statistics=method.statistics(view))[1]
    monkeypatch.setattr(torch.linalg, "svd", lambda *given, **options: (calls.append(1), svd(*given, **options))[1])
    assert len(method.curve(view, moments, unit, unit.ranks[0]).errors) > 3 and len(calls) == 1


@pytest.mark.parametrize(
    "method", [MoDeGPT(rank_multiple=2), Rankfold(rank_multiple=2, residual_correction=False)], ids=lambda m: m.name
)
@pytest.mark.parametrize("family", ["llama-bias", "opt"])
def test_a_fit_after_a_curve_is_the_same_without_another_elimination(family, method, monkeypatch):
    source = opened(family)
    view = source.block(1)
    (unit,) = [u for u in rank_options(source, method).units if (u.block, u.module) == (1, "mlp")]
    moments = rankfold.calibrate(source, tokens(), statistics=method.statistics(view))[1]
    ranks = unit.ranks[len(unit.ranks) // 2 : -1]
    alone = {rank: fitted(method, view, moments, rank) for rank in ranks}
    found = method.curve(view, moments, unit, ranks[0]).found
    monkeypatch.setattr(nystrom, "eliminate_units", None)
    for rank in ranks:
        result = fitted(method, view, moments | found, rank)
        for name, tensor in alone[rank].state.items():
            assert torch.equal(result.state[name], tensor) or torch.allclose(result.state[name], tensor, rtol=1e-6)
        assert result.reports["mlp"]["error"] == pytest.approx(alone[rank].reports["mlp"]["error"], rel=1e-9)
        assert "theorem_1" in alone[rank].reports["mlp"] and "theorem_1" not in result.reports["mlp"]


def fitted(method, view, moments, rank):
    (stage,) = method.stages(view, {"mlp": rank})
    return stage.decompose(view, moments, lambda: None)
