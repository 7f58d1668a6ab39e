"""``allow_expert_removal``: how many experts stay is chosen with their width, by what both are measured to cost."""

from dataclasses import replace

import pytest
import torch
from test_experts import (
    CONFIGS,
    OF_DEEPSEEK,
    PLAIN,
    TOP,
    E,
    blocks_with_experts,
    experts_of,
    logits,
    model_of,
    opened,
    text,
)
from test_reap import check_killed_run
from torch import nn

import rankfold
from families import opened as opened_family
from families import tokens
from rankfold import Rankfold
from rankfold.compression.budget import rank_options
from rankfold.compression.kl_divergence import measure_kl_sensitivity
from rankfold.compression.plan import allocate_ranks, shares
from rankfold.compression.replace import replaced
from rankfold.errors import OptionError, UnsupportedModelError
from rankfold.methods.baselines.reap import REAP

MAY_GO = {"rank_multiple": 2, "allow_expert_removal": True}
SENDS_NOTHING = 1  # an expert of every block
# What experts do that take the place of one that does nothing may be worth more, or experts of groups go in pairs.
MAY_ALL_STAY = {*OF_DEEPSEEK, "lfm2_moe"}


def with_an_idle_expert(family: str) -> nn.Module:
    model = model_of(family)
    for index in blocks_with_experts(model):
        for name, parameter in experts_of(model, index).named_parameters():
            if "down" in name:
                parameter.data[SENDS_NOTHING] = 0
    return model


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def compressed(request, tmp_path_factory):
    model, folder = with_an_idle_expert(request.param), tmp_path_factory.mktemp(request.param) / "small"
    found = rankfold.compress(opened(model), 0.3, **MAY_GO, calibration=text(16), output=folder)
    return request.param, model, found


def test_what_does_nothing_goes_first(compressed):
    family, _, found = compressed
    blocks = [index for index in range(3) if (family, index) not in PLAIN]
    ranks = {(m.block, m.module): m.rank for m in found.plan.modules}
    counts = {ranks.get((index, "expert_count"), E) for index in blocks}
    assert len(counts) == 1
    assert counts < {3, 4, 5} or family in MAY_ALL_STAY
    for index in blocks:
        reports = found.record["blocks"][str(index)]
        if "expert_count" in reports:
            assert SENDS_NOTHING not in reports["expert_count"]["kept"]
        assert reports["experts"]["rank"] == ranks[index, "experts"]


def test_planned_equals_written(compressed):
    _, _, found = compressed
    small = rankfold.load(found.output, device="cpu")
    assert sum(p.numel() for p in small.parameters()) == found.plan.parameters_after
    idle = sum(p[TOP:].numel() for i in blocks_with_experts(small) for p in experts_of(small, i).parameters())
    assert found.plan.parameters_after - idle == found.plan.active_parameters_after
    assert found.plan.sparsity >= 0.3 and found.plan.removed_weights == pytest.approx(
        found.plan.parameters - found.plan.parameters_after, rel=0.03
    )


def test_memory_and_folder_are_the_same_model(compressed):
    _, model, found = compressed
    small = rankfold.compress(opened(model), 0.3, **MAY_GO, calibration=text(16)).model
    torch.testing.assert_close(logits(small), logits(rankfold.load(found.output, device="cpu")), rtol=0, atol=0)


def test_a_killed_run_ends_in_the_same_bytes(tmp_path, monkeypatch):
    check_killed_run(with_an_idle_expert("mixtral"), 0.3, tmp_path, monkeypatch, **MAY_GO, calibration=text(16))


def test_a_size_in_bytes_is_met_exactly(tmp_path):
    source = opened(with_an_idle_expert("qwen2_moe"))
    small = rankfold.compress(source, target_size="150kB", **MAY_GO, calibration=text(16), output=tmp_path / "s")
    assert any(m.module == "expert_count" for m in small.plan.modules)
    stored = sum(p.nbytes for p in rankfold.load(tmp_path / "s", device="cpu").parameters())
    assert 0.97 * 150_000 < stored == small.plan.bytes_after <= 150_000


@torch.no_grad()
def test_the_cost_of_fewer_experts_is_that_of_the_whole_model_without_them():
    """At the number that was tried, in one block; between numbers it grows like the energy that is lost."""
    source, method, calibration = (
        opened(model_of("mixtral")),
        Rankfold(sparsity=0.3, rank_multiple=2, allow_expert_removal=True),
        text(16),
    )
    costs = measure_kl_sensitivity(source, method, calibration, *shares(rank_options(source, method), method))
    ids = calibration.held_out[:4]
    dense = source.model(ids).logits.log_softmax(-1)
    moments = rankfold.calibrate(source, calibration)
    for index in blocks_with_experts(source.model):
        view = source.block(index)
        fewer = {rank: REAP().decompose(view, moments[index], {"expert_count": rank}) for rank in (3, 4, 5)}
        with replaced(replace(view, module=source.blocks[index]), fewer[4], source):
            apart = source.model(ids).logits.log_softmax(-1)
        expected = (dense.exp() * (dense - apart)).sum(-1).mean().item()
        squares = {rank: found.reports["expert_count"]["relative_error"] ** 2 for rank, found in fewer.items()}
        found = costs[index, "expert_count"]
        assert found == pytest.approx({r: expected * squares[r] / squares[4] for r in fewer} | {E: 0}, rel=1e-2)


@pytest.mark.parametrize("sparsity", [0.05, 0.2, 0.35, 0.5])
def test_the_choice_costs_least_of_all(sparsity):
    """Against the knapsack for every number of experts by itself, its sizes counted anew."""
    source = opened(model_of("mixtral"))
    method = Rankfold(sparsity=sparsity, rank_multiple=2, allow_expert_removal=True)
    options = rank_options(source, method)
    generator = torch.Generator().manual_seed(int(100 * sparsity))
    scale = {u.key: torch.rand((), generator=generator).item() for u in (*options.units, *options.experts)}
    costs = {
        u.key: {rank: scale[u.key] * (1 - rank / u.ranks[-1]) ** 2 for rank in u.ranks}
        for u in (*options.units, *options.experts)
    }
    found = allocate_ranks(options, method, costs)
    count = found.ranks.get((0, "expert_count"), E)
    removed = 0
    for u in options.units:
        weights = u.size(found.ranks[u.key]) * (count / E if u.module == "experts" else 1)
        removed += u.dense - weights
    removed += 3 * (E - count) * 32  # rows of the router
    assert removed == found.budget["removed"] >= sparsity * options.counted
    total = sum(costs[key][rank] for key, rank in found.ranks.items())
    alone = allocate_ranks(options._replace(experts=[], priced_experts=[]), method, costs)
    assert total <= sum(costs[key][rank] for key, rank in alone.ranks.items())
    for fewer in (3, 4, 5):
        asked = sparsity * options.counted - sum(u.dense - u.size(fewer) for u in options.experts)
        if asked > 0:
            left = options.with_experts({E: fewer})
            other = allocate_ranks(left, method, costs)
            assert total <= sum(costs[key][rank] for key, rank in other.ranks.items()) + 1e-12


def test_no_more_experts_go_than_the_sparsity_asks_for():
    """Though they cost nothing: the smallest number of them is 13 % of the blocks."""
    options = rank_options(
        opened(model_of("mixtral")), method := Rankfold(sparsity=0.05, rank_multiple=2, allow_expert_removal=True)
    )
    costs = {u.key: {rank: 1 - rank / u.ranks[-1] for rank in u.ranks} for u in options.units}
    costs |= {u.key: dict.fromkeys(u.ranks, 0.0) for u in options.experts}
    found = allocate_ranks(options, method, costs)
    assert not any(module == "expert_count" for _, module in found.ranks)
    assert 0.05 <= found.budget["removed"] / options.counted < 0.1


def test_at_least_half_stay_and_as_many_as_a_token_is_sent_to():
    for active, ranks in ((2, (3, 4, 5, 6)), (4, (4, 5, 6))):
        model = model_of("mixtral")
        model.config.num_experts_per_tok = active
        assert Rankfold(**MAY_GO).expert_counts(opened(model).meta_block(0)).ranks == ranks


def test_where_all_experts_stay():
    source, method = opened(model_of("qwen2_moe")), Rankfold(allow_expert_removal=True)
    assert method.expert_counts(source.meta_block(0)) is not None
    assert method.expert_counts(source.meta_block(1)) is None  # which has none
    for options in ({}, {"allow_expert_removal": True, "allocation": "uniform"}):
        assert all(Rankfold(**options).expert_counts(view) is None for view in source.meta_blocks())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"exclude_blocks": (0,)}, "exclude_blocks"),
        ({"target": "vllm"}, "target vllm"),
        ({"head_dim": 4}, "head_dim"),
        ({"modules": {"experts": 0.3}}, "sparsities of single modules"),
        ({"budget": "latency"}, "a budget in time"),
        ({"modules": ("mlp", "qk", "vo")}, "modules without experts"),
    ],
)
def test_options_that_exclude_each_other(options, named):
    with pytest.raises(OptionError, match=f"allow_expert_removal does not go with {named}; drop one"):
        Rankfold(allow_expert_removal=True, **options)


def test_a_model_without_experts():
    with pytest.raises(UnsupportedModelError, match="llama has no experts that rankfold can remove; leave"):
        rankfold.plan(opened_family("llama"), method=Rankfold(allow_expert_removal=True), calibration=tokens())
