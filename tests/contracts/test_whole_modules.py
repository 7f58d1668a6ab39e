"""The default may take a whole attention or MLP out of a block: what then runs is the dense model without it."""

import itertools
import json
import random
from dataclasses import replace

import pytest
import torch

import rankfold
from activations import ATTENTION, DOWN, OUTPUT, blocks_of, member, weight_of
from families import cached_numbers, filled_cache, named, opened, some_ids, tokens
from rankfold import Rankfold
from rankfold._utils.evaluating import cache_for
from rankfold.allocation.cheapest import cheapest
from rankfold.compression import importance as scores
from rankfold.compression.budget import rank_options
from rankfold.compression.kl_divergence import measure_kl_sensitivity
from rankfold.compression.plan import shares
from rankfold.errors import OptionError
from rankfold.methods import PrunableModule
from rankfold.modules import build

FAMILIES = [
    "llama",
    "llama-bias",
    "gemma2",
    "phi",
    "phi3",
    "opt",
    "gpt2",
    "gpt_neox",
    "falcon-gqa",
    "bloom",
    "cohere2",
    "qwen3",
]
GONE = {(0, "qk"), (0, "vo"), (1, "mlp")}  # the first attention is the one that a cache counts tokens by


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


def method_for(family: str) -> Rankfold:
    """As sparse as the model is without the modules that are gone."""
    method = Rankfold(rank_multiple=2, modules=named(family), allow_module_removal=True)
    units = [unit for i in range(3) for unit in method.prunable_modules(opened(family).block(i))]
    lost = sum(unit.dense for unit in units if (unit.block, unit.module) in GONE)
    return replace(method, sparsity=lost / rank_options(opened(family), method).weights)


@pytest.fixture(scope="module")
def run(family, tmp_path_factory):
    """DenseModel, plan, folder, the model in memory; nothing costs less than to take these modules out."""
    source, method, plans = opened(family), method_for(family), []

    def costs(source, method, tokens, units, *_, **__):
        found = {(u.block, u.module): {u.ranks[-1]: 0.0} for u in units}
        return found | {key: found[key] | {0: 1.0} for key in GONE}

    folder = tmp_path_factory.mktemp("whole") / "small"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "measure_kl_sensitivity", costs)
        rankfold.compress(source, method=method, calibration=tokens(), output=folder, on_plan=plans.append)
        model = rankfold.compress(source, method=method, calibration=tokens()).model
    return source, plans[0], folder, model


@torch.no_grad()
def mean_input(model, projection, ids) -> torch.Tensor:
    seen = []
    hook = projection.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2).double()))
    model(ids, use_cache=False)
    hook.remove()
    return torch.cat(seen).mean(0)


@torch.no_grad()
def test_it_computes_what_the_dense_model_without_them_does(run, family):
    *_, folder, model = run
    dense = opened(family).whole_model()
    for index, kind in ((0, "attention"), (1, "mlp")):
        block = blocks_of(dense)[index]
        projection = member(block, DOWN) if kind == "mlp" else member(member(block, ATTENTION), OUTPUT)
        W, mean = weight_of(projection).clone(), mean_input(dense, projection, tokens().ids)
        projection.weight.zero_()
        if projection.bias is not None:
            projection.bias += (W.double() @ mean).to(W)
    wanted = dense(some_ids()).logits
    torch.testing.assert_close(model(some_ids()).logits, wanted, rtol=1e-3, atol=1e-4)
    loaded = rankfold.load(folder, device="cpu")
    assert torch.equal(loaded(some_ids()).logits, model(some_ids()).logits)


def test_planned_equals_actual(run, family):
    _, plan, folder, model = run
    assert {(m.block, m.module) for m in plan.modules if m.rank == 0} == GONE
    reports = json.loads((folder / "rankfold.json").read_text())["blocks"]
    assert {(int(b), m) for b, report in reports.items() for m in report if report[m]["rank"] == 0} == GONE
    assert all(reports[str(m.block)][m.module]["of"] == m.of for m in plan.modules)
    assert sum(p.numel() for p in model.parameters()) == plan.parameters_after
    cached = cached_numbers(rankfold.load(folder, device="cpu")) * 4
    # Falcon's own attention caches a key head once for each of its query heads.
    assert cached == plan.kv_bytes_per_token_after or family == "falcon-gqa"


def test_bytes_are_those_of_all_that_goes_with_a_module(run, family):
    """Its biases, too."""
    source, *_, model = run
    priced = {unit.key: unit for unit in rank_options(source, replace(method_for(family), budget="bytes")).priced}
    before, after = (sum(p.numel() for p in m.parameters()) for m in (source.model, model))
    assert sum(priced[key].dense - priced[key].size(0) for key in GONE) == 4 * (before - after)


def test_generation_with_cache_equals_without(run):
    *_, model = run
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = some_ids(2, 12)
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, **settings, use_cache=False))


@torch.no_grad()
def test_tokens_after_a_cache_are_where_they_are_without(run):
    *_, model = run
    ids = some_ids()
    cache = filled_cache(model, ids[:, :12])
    found = model(ids[:, 12:], use_cache=True, **cache_for(model, cache)).logits
    torch.testing.assert_close(found, model(ids, use_cache=False).logits[:, 12:], rtol=1e-4, atol=1e-4)


def test_costs_of_whole_modules_are_divergences_without_them():
    source, method = opened("llama"), Rankfold(sparsity=0.5, rank_multiple=2, allow_module_removal=True)
    costs = measure_kl_sensitivity(source, method, tokens(), *shares(rank_options(source, method), method))
    ids = tokens().held_out
    with torch.no_grad():
        dense = source.model(ids).logits.log_softmax(-1)
        for index, module in itertools.product(range(3), ("mlp", "vo")):
            model = opened("llama").whole_model()
            block = model.model.layers[index]
            (block.mlp.down_proj if module == "mlp" else block.self_attn.o_proj).weight.zero_()
            small = model(ids).logits.log_softmax(-1)
            wanted = (dense.exp() * (dense - small)).sum(-1).mean().item()
            assert costs[index, module][0] == pytest.approx(wanted, rel=2e-3, abs=1e-7)
            assert costs[index, "qk"][0] == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_go_together_are_the_cheapest_there_are(seed):
    """By trying them all."""
    draw = random.Random(seed)
    units = [
        PrunableModule(b, m, (0, 2, 4, 6), tuple(size * r for r in (0, 2, 4, 6)))
        for b in (0, 1)
        for m, size in (("qk", 3), ("vo", 4))
    ]
    costs = {(u.block, u.module): {r: draw.random() * (6 - r) for r in u.ranks} for u in units}
    remove = draw.randint(1, 80)
    found = cheapest(units, costs, remove, together={"qk": "vo"})

    def value(ranks):
        gone = [(ranks[i] == 0) == (ranks[i + 1] == 0) for i in (0, 2)]
        removed = sum(u.dense - u.size(r) for u, r in zip(units, ranks, strict=True))
        cost = sum(costs[u.block, u.module][r] for u, r in zip(units, ranks, strict=True))
        return cost if all(gone) and removed >= remove else float("inf")

    best = min(value(ranks) for ranks in itertools.product(*(u.ranks for u in units)))
    assert value([found[u.block, u.module] for u in units]) == pytest.approx(best)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"budget": "latency"}, "a budget in time"), ({"modules": {"mlp": 0.3}}, "sparsities of single modules")],
)
def test_what_excludes_this_option(options, named):
    with pytest.raises(OptionError, match=f"allow_module_removal does not go with {named}; drop one"):
        Rankfold(allow_module_removal=True, **options)


@pytest.mark.parametrize("options", [{}, {"allow_module_removal": True, "allocation": "uniform"}])
def test_where_something_of_every_module_stays(options):
    view = opened("llama").block(0)
    assert {u.ranks[0] for u in Rankfold(rank_multiple=2, allow_module_removal=True).prunable_modules(view)} == {0}
    assert 0 not in {u.ranks[0] for u in Rankfold(rank_multiple=2, **options).prunable_modules(view)}
    assert {
        u.module: u.ranks[0]
        for u in Rankfold(rank_multiple=2, modules=("mlp", "vo"), allow_module_removal=True).prunable_modules(view)
    } == {
        "mlp": 0,
        "vo": 2,
    }


def test_one_width_of_an_attention_is_refused():
    spec = {"kind": "attention", "heads": 2, "kv_heads": 2, "qk_dim": 0, "vo_dim": 4, "scaling": 1.0}
    with pytest.raises(ValueError, match="has both widths or none, got qk_dim 0 and vo_dim 4"):
        build(spec, opened("llama").model.model.layers[0].self_attn)


@pytest.mark.parametrize("family", ["llama", "llama-bias"], indirect=True)
def test_other_forms_hold_zeros_in_their_place(run, tmp_path):
    """Compared with the compressed model before they get their name."""
    assert rankfold.export(run[2], tmp_path / "out", "deci").difference < 1e-5
