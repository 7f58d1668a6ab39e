"""Families whose blocks have something else in place of attention: linear attention, a convolution.

Only MLPs of these blocks are compressed. What they send is looked at through transformers' own classes. A block of
Nemotron-H has one of these, attention, or an MLP, all by one name.
"""

import pytest
import torch
import transformers as t

import rankfold
from families import GQA, HEADS_OF_MAMBA, HEADS_OF_STATES, cached_numbers, some_ids, tokens
from rankfold.calibration.runner import advance, outputs, start
from rankfold.compression.replace import replace
from rankfold.errors import RankfoldError, UnsupportedModelError
from rankfold.evaluation.complexity import cache_bytes, formula_macs
from rankfold.methods import BlockResult
from rankfold.methods.result import put_attention
from rankfold.recovery.tuning import _linear_layers

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
    "nemotron_h": lambda: t.NemotronHConfig(
        **{key: value for key, value in GQA.items() if key != "num_hidden_layers"},
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 16},
        **{"head_dim": 8, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ),
}
PLACE = {
    **{"qwen3_5_text": "linear_attn", "lfm2": "conv"},
    **dict.fromkeys(("granitemoehybrid", "bamba", "falcon_h1"), "mamba"),
    "nemotron_h": "mixer",  # with a state
}
DOWN = {
    **{"qwen3_5_text": "mlp.down_proj", "lfm2": "feed_forward.w2", "granitemoehybrid": "shared_mlp.output_linear"},
    **dict.fromkeys(("bamba", "falcon_h1"), "feed_forward.down_proj"),
    "nemotron_h": "mixer.down_proj",
}
METHODS = ["rankfold", "modegpt", "latentllm", "svd-llm", "flap", "llm-pruner", "obd", "shortgpt"]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def model_of(family: str):
    torch.manual_seed(0)
    return t.AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()


def in_place(block, family: str):
    """What a block has in place of attention; ``None`` where it has none."""
    found = getattr(block, PLACE[family], None)
    return found if family != "nemotron_h" or hasattr(found, "A_log") else None


def opened(dense):
    source = rankfold.open_model(dense, device="cpu")
    source.autocast = None
    return source


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
        own, before = (in_place(one, family) for one in (block, theirs))
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


@torch.no_grad()
@pytest.mark.parametrize("family", CONFIGS)
def test_blocks_run_one_by_one_and_attention_replaced_at_full_rank_leave_the_logits(family):
    dense = model_of(family)
    source, replaced = opened(dense), 0
    stream = start(source, some_ids(), autocast=None)
    for index in range(BLOCKS):
        view, result = source.block(index), BlockResult()
        if view.attention.spec.qkv:
            full, replaced = view.attention.head_dim, replaced + 1
            projections = zip("qkvo", (*view.attention.qkv(), view.attention.output), strict=True)
            put_attention(result, view.attention, dict(projections), full, full)
        advance(replace(view, result, source), stream)
    assert replaced == {"qwen3_5_text": 0, "falcon_h1": 0, "nemotron_h": 1}.get(family, 2)
    torch.testing.assert_close(outputs(source, some_ids(), stream), dense(some_ids()).logits)


@pytest.mark.parametrize("family", CONFIGS)
def test_moments_are_of_the_hidden_units_of_transformers_own_forward(family):
    dense, seen = model_of(family), {}
    for name, module in dense.named_modules():
        if name.endswith(f".{DOWN[family]}"):
            index = int(name.split(".")[2])
            module.register_forward_pre_hook(
                lambda _, args, index=index: seen.setdefault(index, []).append(args[0].detach())
            )
    data = tokens()
    moments = rankfold.calibrate(opened(dense), data, statistics={"mlp_hidden"})
    with_mlp = {index for index in range(BLOCKS) if "mlp_hidden" in moments[index]}
    assert with_mlp == seen.keys() == ({1, 3} if family == "nemotron_h" else {*range(BLOCKS)})
    seen.clear()
    with torch.no_grad():
        for ids in data.ids.split(4):
            dense(ids)
    for index, states in seen.items():
        rows = torch.cat([s.flatten(0, 1) for s in states]).double()
        found = moments[index]["mlp_hidden"].second_moment()
        torch.testing.assert_close(found, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("method, modules", [("modegpt", ("vo",)), ("flap", ("heads",)), ("latentllm", ("q", "o"))])
@pytest.mark.parametrize("family, blocks", [("lfm2", {1, 3}), ("nemotron_h", {2})])
def test_attention_is_compressed_where_it_is(family, blocks, method, modules):
    """It may be named although the first block has none."""
    plan = rankfold.plan(model_of(family), 0.01, method=method, calibration=tokens(), modules=modules, rank_multiple=2)
    assert {module.block for module in plan.modules} == blocks
    assert {module.module for module in plan.modules} == {*modules}


@pytest.mark.parametrize("method, modules", [("modegpt", ("mlp",)), ("flap", ("mlp",)), ("latentllm", ("up", "down"))])
def test_mlps_are_compressed_where_they_are(method, modules):
    dense = model_of("nemotron_h")
    plan = rankfold.plan(dense, 0.01, method=method, calibration=tokens(), modules=modules, rank_multiple=2)
    assert {(module.block, module.module) for module in plan.modules} == {
        (n, module) for n in (1, 3) for module in modules
    }


@pytest.mark.parametrize("module, blocks", [("qkv", [2]), ("up", [1, 3]), ("down", [1, 3])])
def test_zeros_are_set_where_a_module_is(module, blocks):
    found = rankfold.compress(model_of("nemotron_h"), method="wanda", modules={module: 0.5}, calibration=tokens())
    assert [row.block for row in found.plan.modules] == blocks


@pytest.mark.parametrize(
    "method, options, message",
    [
        (
            "wanda",
            {"sparsity": 0.5},
            r"linear layers that are module 'qkv' \(it has a state in place of keys and values\); use modules={'o'",
        ),
        ("modegpt", {"head_dim": 4}, "gives none only; leave head_dim out"),
        ("modegpt", {"modules": ("experts",)}, "no module is left to compress"),
        ("latentllm", {"modules": ("gate",)}, "no module 'gate' that can be compressed; it has: q,k,v,o,up,down"),
        ("latentllm", {"joint": "ud"}, "cannot take the joint form 'ud': the closed form of App. H is for ReLU"),
        ("slicegpt", {}, "its spec does not say how its norms work"),
        ("basis-sharing", {}, "differ in module 'q'; leave it out of modules, or take group_size=1"),
    ],
)
def test_what_such_blocks_do_not_have_is_refused_in_one_line(method, options, message):
    with pytest.raises(RankfoldError, match=message) as error:
        rankfold.compress(model_of("nemotron_h"), method=method, calibration=tokens(), **{"sparsity": 0.1, **options})
    assert "\n" not in str(error.value)


def test_adapters_are_put_on_mlps_alone_where_asked():
    dense = model_of("nemotron_h")
    mlps = [f"model.layers.{block}.mixer.{name}_proj" for block in (1, 3) for name in ("up", "down")]
    assert _linear_layers(dense, mlp_only=True) == mlps
    everywhere = {name.rpartition(".")[2] for name in _linear_layers(dense, mlp_only=False)}
    assert everywhere == {"in_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"}


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
