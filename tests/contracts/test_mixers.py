"""Families whose blocks have something else in place of attention: linear attention, a convolution.

Only MLPs of these blocks are compressed. What they send is looked at through transformers' own classes.
"""

import pytest
import torch
import transformers as t

import rankfold
from families import GQA, HEADS_OF_MAMBA, HEADS_OF_STATES, cached_numbers, some_ids, tokens
from rankfold.errors import UnsupportedModelError
from rankfold.evaluation.complexity import cache_bytes, formula_macs

BLOCKS = 4
DEEP = GQA | {"num_hidden_layers": BLOCKS}
LINEAR = ["linear_attention", "full_attention"] * 2
CONFIGS = {
    "qwen3_5_text": lambda: t.Qwen3_5TextConfig(**DEEP, **HEADS_OF_STATES, head_dim=8, layer_types=LINEAR),
    "lfm2": lambda: t.Lfm2Config(**DEEP, layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False),
    "granitemoehybrid": lambda: t.GraniteMoeHybridConfig(  # nothing rotates
        **DEEP,
        **HEADS_OF_MAMBA,
        **{"layer_types": LINEAR, "num_local_experts": 0, "shared_intermediate_size": 48},
        position_embedding_type="nope",
    ),
    "bamba": lambda: t.BambaConfig(**DEEP, **HEADS_OF_MAMBA, attn_layer_indices=[1, 3]),
    "falcon_h1": lambda: t.FalconH1Config(  # attention in all blocks, beside it
        **DEEP, **HEADS_OF_MAMBA, mamba_d_ssm=64, mlp_multipliers=[0.8, 1.25], attention_out_multiplier=0.7
    ),
}
PLACE = {
    **{"qwen3_5_text": "linear_attn", "lfm2": "conv"},
    **dict.fromkeys(("granitemoehybrid", "bamba", "falcon_h1"), "mamba"),
}
DOWN = {
    **{"qwen3_5_text": "mlp.down_proj", "lfm2": "feed_forward.w2", "granitemoehybrid": "shared_mlp.output_linear"},
    **dict.fromkeys(("bamba", "falcon_h1"), "feed_forward.down_proj"),
}
METHODS = ["rankfold", "modegpt", "latentllm", "svd-llm", "flap", "llm-pruner", "obd", "shortgpt"]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def model_of(family: str):
    torch.manual_seed(0)
    return t.AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()


def options_of(method: str) -> dict:
    return {} if method == "shortgpt" else {"rank_multiple": 2}


@pytest.fixture(scope="module", params=[(family, method) for family in CONFIGS for method in METHODS], ids=":".join)
def run(request, tmp_path_factory):
    family, method = request.param
    dense, folder = model_of(family), tmp_path_factory.mktemp(family) / method
    sparsity = 0.2 if method == "shortgpt" else 0.15
    found = rankfold.compress(dense, sparsity, method=method, calibration=tokens(), output=folder, **options_of(method))
    return family, dense, found, rankfold.load(folder)


def test_the_parameters_are_as_planned(run):
    _, dense, found, small = run
    count = sum(p.numel() for p in small.parameters())
    assert count == found.plan.parameters_after < sum(p.numel() for p in dense.parameters())


def test_what_stands_in_place_of_attention_is_as_it_was(run):
    family, dense, found, small = run
    kept = [module.block for module in found.plan.modules if module.module == "block" and module.rank]
    for block, place in zip(small.model.layers, kept or range(BLOCKS), strict=True):
        theirs = dense.model.layers[place]
        own, before = (getattr(one, PLACE[family], None) for one in (block, theirs))
        assert (own is None) == (before is None)
        if own is not None:
            own, before = own.state_dict(), before.state_dict()
            assert own.keys() == before.keys() and all(torch.equal(own[name], before[name]) for name in own)


@torch.no_grad()
def test_generation_with_a_cache_is_generation_without(run):
    *_, small = run
    ids = some_ids()
    mask = torch.ones_like(ids)
    cached = small.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(cached, small.generate(ids, attention_mask=mask, use_cache=False, **GREEDY))


@pytest.mark.parametrize("family", CONFIGS)
def test_nothing_removed_leaves_the_logits(family, tmp_path):
    dense = model_of(family)
    rankfold.compress(dense, 0.0, method="modegpt", calibration=tokens(), output=tmp_path / "small")
    with torch.no_grad():
        expected, found = (model(some_ids()).logits for model in (dense, rankfold.load(tmp_path / "small")))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", CONFIGS)
def test_moments_are_of_the_hidden_units_of_transformers_own_forward(family):
    dense, seen = model_of(family), {}
    for index, block in enumerate(dense.model.layers):
        block.get_submodule(DOWN[family]).register_forward_pre_hook(
            lambda _, args, index=index: seen.setdefault(index, []).append(args[0].detach())
        )
    data = tokens()
    source = rankfold.open_model(dense, device="cpu")
    source.autocast = None
    moments = rankfold.calibrate(source, data, statistics={"mlp_hidden"})
    seen.clear()
    with torch.no_grad():
        for ids in data.ids.split(4):
            dense(ids)
    for index, states in seen.items():
        rows = torch.cat([s.flatten(0, 1) for s in states]).double()
        found = moments[index]["mlp_hidden"].second_moment()
        torch.testing.assert_close(found, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("method, modules", [("modegpt", ("vo",)), ("flap", ("heads",)), ("latentllm", ("q", "o"))])
def test_attention_is_compressed_where_it_is(method, modules):
    """It may be named although the first block has none."""
    dense = model_of("lfm2")
    plan = rankfold.plan(dense, 0.01, method=method, calibration=tokens(), modules=modules, rank_multiple=2)
    assert {module.block for module in plan.modules} == {1, 3}
    assert {module.module for module in plan.modules} == {*modules}


@pytest.mark.parametrize("family", CONFIGS)
def test_only_attention_caches_keys_and_values(family):
    dense = model_of(family)
    plan = rankfold.plan(dense, 0.2, method="modegpt", calibration=tokens(), modules=("mlp",))
    assert plan.kv_bytes_per_token == plan.kv_bytes_per_token_after == 4 * cached_numbers(dense) > 0
    assert cache_bytes(dense) == plan.kv_bytes_per_token


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("method", ["modegpt", "latentllm", "flap", "shortgpt"])
def test_bytes_and_the_cache_after_are_those_of_the_result(family, method):
    dense, options = model_of(family), options_of(method)
    size = int(0.9 * sum(p.numel() * p.element_size() for p in dense.parameters()))
    found = rankfold.compress(dense, target_size=size, method=method, calibration=tokens(), **options)
    stored = {x.data_ptr(): x.nbytes for x in found.model.state_dict().values()}  # a tied head once
    assert sum(stored.values()) == found.plan.bytes_after <= size
    assert found.plan.kv_bytes_per_token_after == cache_bytes(found.model)


def test_the_last_attention_is_not_removed():
    """The cache of transformers reads off it how long a text is."""
    dense = model_of("lfm2")
    plan = rankfold.compress(dense, 0.7, method="shortgpt", calibration=tokens()).plan
    assert [module.block for module in plan.modules if module.rank] == [3]


@pytest.mark.parametrize("family", CONFIGS)
def test_what_is_not_a_matter_of_shapes_is_refused_in_one_line(family):
    dense = model_of(family)
    with pytest.raises(UnsupportedModelError, match="mixes tokens by more than attention"):
        formula_macs(dense, 16)
    with pytest.raises(UnsupportedModelError, match="mixes tokens by more than attention"):
        rankfold.compress(dense, 0.2, method="modegpt", calibration=tokens(), budget="flops")
