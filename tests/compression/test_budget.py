"""Budgets count what the finished model has: bytes on disk, multiply-accumulates of a forward, time by a clock."""

import itertools
import json
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import rankfold
from families import opened, tiny_model, tokens
from rankfold import LatentLLM, MoDeGPT, Rankfold, make_method
from rankfold.allocation import Bytes, FLOPs, Latency
from rankfold.allocation.ranks import allocate
from rankfold.compression import latency as timing
from rankfold.compression.budget import rank_options
from rankfold.compression.latency import ModuleLatency
from rankfold.errors import CheckpointError, OptionError, UnsupportedModelError
from rankfold.evaluation.complexity import cache_bytes, counted_macs, formula_macs, planned_macs
from tiny_encoders import opened_encoder

SMALL = {"rank_multiple": 2, "sparsity": 0.25}
METHODS = {
    "modegpt": MoDeGPT(**SMALL),
    "latentllm": LatentLLM(**SMALL),
    "bits": LatentLLM(**SMALL, bits=4, chunk=8, joint="none"),
    "sparse": LatentLLM(sparsity=0.3, rank_multiple=2, sparse=1.0),
    "flap": make_method("flap", **SMALL),
    "influence": MoDeGPT(**SMALL, allocation="influence"),
    "measured": Rankfold(**SMALL),
}


def under(name: str, **options):
    return replace(METHODS[name], **options)


def plan_of(source, method):
    """With scores where the allocation wants them."""
    moments = rankfold.calibrate(source, tokens()) if method.allocation.statistic else None
    return rankfold.plan(
        source, method=method, calibration=tokens() if method.allocation.needs_text else None, moments=moments
    )


def bytes_on_disk(folder) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as handle:
            tensors = [handle.get_tensor(name) for name in handle.keys()]  # noqa: SIM118
        total += sum(t.numel() * t.element_size() for t in tensors)
    return total


@pytest.mark.parametrize("family", ["llama-bias", "opt"])
@pytest.mark.parametrize("name", ["modegpt", "bits", "flap"])
def test_bytes_are_those_on_disk(name, family, tmp_path):
    source, method = opened(family), under(name, budget="bytes", scope="model")
    plan = plan_of(source, method)
    dense = sum(p.numel() for p in source.model.parameters()) * 4
    folder = rankfold.compress(
        source, method=method, calibration=tokens(), output=tmp_path / "small", mode="one-pass"
    ).output
    removed = dense - bytes_on_disk(folder)
    assert plan.budget["counted"] == dense and plan.budget["removed"] == removed == plan.bytes - plan.bytes_after
    assert removed >= plan.budget["asked"] >= 0.25 * dense > removed - 0.03 * dense


def test_bytes_of_the_blocks_leave_out_what_surrounds_them():
    source = opened("llama-bias")
    plan = plan_of(source, under("modegpt", budget="bytes"))
    assert plan.budget["counted"] == 4 * sum(p.numel() for p in source.blocks.parameters())
    assert "bytes (-25.0% asked)" in [str(cell) for cell in plan.summary().columns[0].cells]


@pytest.mark.parametrize("family", ["llama-bias", "opt", "qwen3"])
@pytest.mark.parametrize("name", ["modegpt", "latentllm", "bits", "flap", "shortgpt"])
def test_bytes_with_a_batch_are_those_on_disk_and_in_a_full_cache(name, family, tmp_path):
    """The cache is filled, and counted tensor by tensor."""
    counts = {"budget": Bytes(context=16, batch=3), "scope": "model"}
    source, is_removal = opened(family), name == "shortgpt"
    method = make_method(name, sparsity=0.25, **counts) if is_removal else under(name, **counts)
    plan = rankfold.plan(
        source,
        method=method,
        calibration=tokens(),
        moments=rankfold.calibrate(source, tokens()) if is_removal else None,
    )
    folder = rankfold.compress(
        source, method=method, calibration=tokens(), output=tmp_path / "small", mode=method.modes[0]
    ).output
    model = rankfold.load(folder, device="cpu")
    dense = sum(p.numel() for p in source.model.parameters()) * 4 + 3 * 16 * cache_bytes(source.model)
    removed = dense - bytes_on_disk(folder) - 3 * 16 * cache_bytes(model)
    assert plan.budget["counted"] == dense
    assert plan.budget["removed"] == removed >= plan.budget["asked"] >= method.sparsity * dense - 1
    assert (plan.budget["context"], plan.budget["batch"]) == (16, 3)
    assert any("bytes with the cache of 3 x 16 tokens" in str(cell) for cell in plan.summary().columns[0].cells)


def test_the_more_sequences_the_smaller_the_cache():
    """Of a budget that weighs the cache more, the cache takes a smaller part; exact ranks make it so for any costs."""
    source, sizes = opened("llama"), []
    for batch in (0, 2, 8, 64):
        method = under("measured", budget=Bytes(context=64, batch=batch))
        found = rank_options(source, method)
        costs = {(u.block, u.module): {rank: (1 - rank / u.ranks[-1]) ** 2 for rank in u.ranks} for u in found.priced}
        ranks, _ = allocate(found.priced, method, found.counted, costs)
        sizes.append(sum(rank for (_, module), rank in ranks.items() if module in ("qk", "vo")))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_a_batch_goes_with_bytes_and_with_what_caches():
    with pytest.raises(OptionError, match="unknown option of budget flops 'batch'; available: context"):
        MoDeGPT(budget="flops:batch=8")
    with pytest.raises(OptionError, match="batch of budget bytes must be >= 0, got -1"):
        Bytes(batch=-1)
    with pytest.raises(UnsupportedModelError, match="bert is an encoder and caches nothing"):
        rankfold.plan(opened_encoder("bert"), method=MoDeGPT(budget="bytes:batch=8"))


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "phi3", "gemma3-images"])
# Not `name`, of which other functions have more values: so few all are in `make test`.
@pytest.mark.parametrize("counted", ["modegpt", "latentllm", "flap", "influence", "measured"])
def test_flops_are_those_of_a_forward(counted, family):
    source, method = opened(family), under(counted, budget=FLOPs(context=16), scope="model")
    plan = plan_of(source, method)
    dense = formula_macs(source.model, 16)["total"]
    assert 16 * plan.budget["counted"] == dense == counted_macs(source.model, 16)
    assert dense - 16 * plan.budget["removed"] == planned_macs(source, plan, 16)["total"]
    assert plan.budget["removed"] >= plan.budget["asked"] >= 0.25 * plan.budget["counted"]
    assert plan.budget["context"] == 16


def test_flops_of_the_blocks_leave_out_the_head_and_the_context_is_the_model_s_at_most():
    source = opened("llama")
    blocks, whole = (plan_of(source, under("modegpt", budget="flops", scope=of)).budget for of in ("blocks", "model"))
    assert whole["counted"] - blocks["counted"] == 32 * 96
    assert blocks["context"] == source.context_length == 64


def test_flops_of_a_tower_have_neither_the_language_model_nor_its_head():
    source = rankfold.open_model(tiny_model("gemma3-images"), device="cpu", component="vision")
    blocks, whole = (
        rank_options(source, under("modegpt", budget="flops", scope=scope)).counted for scope in ("blocks", "model")
    )
    assert whole == blocks


@pytest.mark.parametrize("budget", ["parameters", "bytes", "flops"])
@pytest.mark.parametrize("name", [n for n in METHODS if n not in ("influence", "measured")])
def test_each_budget_is_met_and_not_by_much(name, budget):
    plan = plan_of(opened("llama"), under(name, budget=budget))
    counted, asked, removed = (plan.budget[key] for key in ("counted", "asked", "removed"))
    assert 0 <= removed - asked < 0.02 * counted and asked >= METHODS[name].sparsity * counted > asked - 1


def test_blocks_of_one_shape_with_other_ranks_have_prices_of_their_own():
    """The first and the last block of SliceGPT have a border that those between have not."""
    dense = opened("llama", blocks=4)
    found = rankfold.compress(dense, 0.2, method="slicegpt", calibration=tokens(), budget="bytes", rank_multiple=1)
    before, after = (sum(p.nbytes for p in model.model.layers.parameters()) for model in (dense.model, found.model))
    assert found.plan.budget["removed"] == before - after
    step = found.plan.budget["removed"] - found.plan.budget["asked"]
    assert 0 <= step < found.plan.budget["counted"] / 16  # a step of the width, of 32


@pytest.fixture(scope="module", params=["parameters", "bytes", "flops", "latency"])
def priced(request):
    """Return the ranks under a budget; times by a clock that adds up what was built."""
    method = under("measured", budget=request.param)
    return rank_options(opened("llama-bias"), method) if request.param != "latency" else timed_choices(method), method


def timed_choices(method):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_run", by_weight)
        return rank_options(opened("llama-bias"), method)


def by_weight(module, *_) -> float:
    """Seconds of a block on a machine that takes 1 ms for a hundred weights, and as long again to begin with."""
    return 0.01 + sum(p.numel() for p in module.parameters()) * 1e-5


@given(st.integers(0, 10**6))
@settings(max_examples=4, deadline=None)
def test_a_tighter_budget_never_costs_less_and_never_leaves_more(priced, seed):
    found, method = priced
    draw, costs = random.Random(seed), {}
    for u in found.priced:
        scale, power = draw.uniform(0.1, 10), draw.uniform(0.5, 4)
        costs[u.block, u.module] = {rank: scale * (1 - rank / u.ranks[-1]) ** power for rank in u.ranks}
    before = (0, 0.0)
    for percent in range(10, 75, 10):
        ranks, _ = allocate(found.priced, replace(method, sparsity=percent / 100), found.counted, costs)
        now = (
            sum(u.dense - u.size(ranks[u.block, u.module]) for u in found.priced),
            sum(cost[ranks[key]] for key, cost in costs.items()),
        )
        assert now[0] >= percent / 100 * found.counted - 1e-6 and now[0] >= before[0] and now[1] >= before[1] - 1e-9
        before = now


def test_times_are_what_the_clock_says():
    """On a machine where time goes with weights, so does the budget."""
    found = timed_choices(under("modegpt", budget="latency"))
    blocks = [sum(p.numel() for p in b.parameters()) for b in opened("llama-bias").blocks]
    assert found.counted == round(sum(0.01 + n * 1e-5 for n in blocks) * 1e9)
    for unit, plain in zip(
        found.priced, rank_options(opened("llama-bias"), under("modegpt", budget="bytes")).priced, strict=True
    ):
        assert unit.ranks == plain.ranks
        for rank in unit.ranks[:-1]:
            gone = (plain.dense - plain.size(rank)) // 4 * 1e-5
            if unit.module != "vo":  # the value bias goes as a whole, and only where the output projection has one
                assert unit.dense - unit.size(rank) == pytest.approx(gone * 1e9, rel=0.02), (unit.module, rank)


def test_savings_fall_and_are_interpolated():
    table = ModuleLatency((0,), "mlp", 100, {10: 8.0, 40: 5.0, 70: 6.0, 90: -1.0})  # 40 and 70 pool to 5.5
    own = 8.0 * 100 / 90
    wanted = {10: 8.0, 25: 6.75, 40: 5.5, 55: 5.5, 70: 5.5, 80: 2.25, 90: -1.0, 100: 0.0}
    assert {r: (own - table.nanoseconds(r) * 1e-9) for r in wanted} == pytest.approx(wanted, abs=1e-8)


def test_ranks_that_save_no_time_are_no_choice(monkeypatch):
    """A kernel that is slower than the dense one down to half of its width."""

    def padded(module, *_):
        width = module.mlp.down_proj.weight.shape[1]
        return 1.0 + (48 if width == 48 else max(width, 28) + 4) * 1e-3

    monkeypatch.setattr(timing, "_run", padded)
    found = rank_options(opened("llama"), under("modegpt", budget="latency", modules=("mlp",)))
    assert all(min(u.ranks) >= 24 and set(u.ranks) <= {*range(24, 46, 2), 48} for u in found.priced)
    assert all(a < b for u in found.priced for a, b in itertools.pairwise(u.sizes))


def test_a_run_that_goes_on_takes_the_times_it_has(tmp_path, monkeypatch):
    source, method = opened("llama"), under("measured", budget="latency")
    kept = tmp_path / "times.json"
    first = rank_options(source, method, kept)
    monkeypatch.setattr(timing, "_run", lambda *_: pytest.fail("measured again"))
    again = rank_options(source, method, kept)
    assert again == first and first.facts["threads"] == torch.get_num_threads() and first.facts["tables"]
    kept.write_text('{"tables": 3}')
    with pytest.raises(CheckpointError, match="times.json is damaged"):
        rank_options(source, method, kept)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "qwen3", "phi3", "gemma2", "falcon-alibi", "gpt_neox"])
def test_a_compressed_model_under_a_budget_in_time_loads(family, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.0)
    method = MoDeGPT(sparsity=0.1, rank_multiple=2, budget=Latency(context=16))

    def runs(module, inputs, kwargs, *_):
        module(*inputs, **kwargs)
        return by_weight(module)

    monkeypatch.setattr(timing, "_run", runs)
    folder = rankfold.compress(opened(family), method=method, calibration=tokens(), output=tmp_path / "small").output
    assert not list(folder.glob("times.json"))
    budget = json.loads((folder / "rankfold.json").read_text())["plan"]["budget"]
    assert budget["counts"] == "nanoseconds" and budget["removed"] >= budget["asked"] > 0
    assert {t["module"] for t in budget["tables"]} <= {"mlp", "qk", "vo"} and budget["context"] == 16
    rankfold.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: MoDeGPT(budget="watts"),
            OptionError,
            "unknown budget 'watts'; available: parameters, bytes, flops, latency",
        ),
        (lambda: FLOPs(context=0), OptionError, "context of budget flops must be >= 1, got 0"),
        (lambda: LatentLLM(budget="latency"), OptionError, "takes budget parameters or bytes or flops, got latency"),
        (
            lambda: make_method("flap", budget="latency"),
            OptionError,
            "got latency; take one of these, or another method",
        ),
        (lambda: MoDeGPT(budget="latency", scope="model"), OptionError, "is the time of the blocks, got scope=model"),
        (lambda: LatentLLM(budget="flops", junction="lu"), OptionError, "junction=lu .* multiply more than they store"),
        (
            lambda: rankfold.plan(opened("mixtral"), method=MoDeGPT(budget="flops", rank_multiple=2)),
            UnsupportedModelError,
            "mixtral routes tokens to experts",
        ),
        (
            lambda: rankfold.plan(opened("llama"), method=MoDeGPT(budget="flops", sparsity=0.97)),
            OptionError,
            "multiply-accumulates per token that must go",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
