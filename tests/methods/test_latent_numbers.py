"""Numbers of the latent methods that a plan goes by, and what rounding leaves alone."""

import pytest
import torch

import rankfold
from families import opened, tokens
from rankfold import LatentLLM
from rankfold.methods.latentllm.layout import dense_projections, slots

PATHS = {"up": "fc1", "down": "fc2"}  # in OPT


def method_for(**options) -> rankfold.LatentLLM:
    return rankfold.LatentLLM(**{"sparsity": 0.3, "rank_multiple": 2} | options)


def test_what_rounding_changes_goes_into_no_bias_without_the_refit():
    source, method = opened("llama-bias"), method_for(bits=2, chunk=16, bias_refit=False)
    view = source.block(0)
    moments = rankfold.calibrate(source, tokens(32), statistics=method.statistics(view))[0]
    ranks = {unit.module: unit.ranks[0] for unit in method.prunable_modules(view)}
    state = method.decompose(view, moments, ranks).state
    for name, dense in zip("qkv", view.attention.qkv(), strict=True):
        torch.testing.assert_close(state[f"self_attn.{name}_proj.bias"], dense.bias)


def test_joint_forms_move_no_bias_without_the_refit():
    source, method = opened("opt", blocks=1), method_for(bias_refit=False)
    view = source.block(0)
    moments = rankfold.calibrate(source, tokens(200), statistics=LatentLLM(sparsity=0.3).statistics(view))[0]
    ranks = {unit.module: unit.ranks[0] for unit in method.prunable_modules(view)}
    dense, result = dense_projections(method, view), method.decompose(view, moments, ranks)
    biases = {name.removesuffix(".bias"): t for name, t in result.state.items() if name.endswith("bias")}
    for module, report in result.reports.items():
        (bias,) = (t for path, t in biases.items() if path.endswith((f"{module}_proj", PATHS.get(module, "-"))))
        assert report["form"] == "local" and torch.equal(bias, dense[module].bias), module


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_the_sparse_part_is_its_share_of_all_numbers(share):
    source, method = opened("llama"), method_for(sparse=share)
    for module, slot in slots(method, source.meta_block(0)).items():
        for rank in slot.ladder()[0][:-1]:
            assert slot.nonzeros(rank) == pytest.approx(share * slot.numbers(rank), abs=1), module


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_keys_whose_rank_comes_from_spectra_are_planned_with_the_cache_of_their_heads(family):
    source = opened(family)
    by_plan, by_spectra = (
        rankfold.plan(source, method=method_for(sparsity=0.6, qk_ranks=ranks)) for ranks in ("plan", "spectra")
    )
    assert by_plan.kv_bytes_per_token_after < by_spectra.kv_bytes_per_token_after


@pytest.mark.parametrize("options", [{"shared_qkv": True}, {}])
def test_where_only_the_output_projection_loses_weights_the_others_stay_as_they_are(options):
    source, method = opened("llama"), method_for(joint="none", **options)
    view = source.block(0)
    moments = rankfold.calibrate(source, tokens(8), statistics=method.statistics(view))[0]
    units = {unit.module: unit for unit in method.prunable_modules(view)}
    ranks = {name: unit.ranks[0] if name == "o" else unit.ranks[-1] for name, unit in units.items()}
    result = method.decompose(view, moments, ranks)
    for name, dense in zip("qkv", view.attention.qkv(), strict=True):
        assert torch.equal(result.state[f"self_attn.{name}_proj.weight"], dense.weight)
    for name, report in result.reports.items():
        assert report["of"] == units[name].ranks[-1] and report["rank"] == ranks[name], name
