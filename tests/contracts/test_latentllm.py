"""What must hold for the latent methods on every family."""

import pytest
import torch

import rankfold
from families import EXPERTS, KINDS, filled_cache, opened, some_ids, tokens
from rankfold import LatentLLM
from rankfold.calibration.runner import advance, measure, start
from rankfold.compression.replace import replace
from rankfold.errors import NumericsError, OptionError, UnsupportedModelError
from rankfold.methods.base import BlockResult
from rankfold.methods.latentllm.attention import ATTENTION, decompose_attention
from rankfold.methods.latentllm.experts import decompose_experts
from rankfold.methods.latentllm.layout import EXPERTS as OF_EXPERTS
from rankfold.methods.latentllm.mlp import decompose_mlp
from rankfold.methods.latentllm.options import JOINT
from rankfold.modules import CompressedAttention, LatentLinear, build

FAMILIES = KINDS
JUNCTIONS = ["block_identity_right", "block_identity_left", "lu", "symmetric", "left", "right"]


def method_for(family: str, **options) -> LatentLLM:
    sparsity = 0.1 if family in EXPERTS else 0.3
    return LatentLLM(**{"sparsity": sparsity, "rank_multiple": 1} | options)


@torch.no_grad()
def logits(model):
    return model(some_ids()).logits


def full_rank_block(family: str, **options):
    """Block 0 with every projection latent at full rank, and the same block dense, run on the same stream."""
    source = opened(family, blocks=1)
    method = method_for(family, ridge=1e-12, **options)
    view = source.block(0)
    moments = measure(view, start(source, tokens(32).ids, autocast=None), method.statistics(view), step=False)
    ranks = {u.module: u.ranks[-1] for u in method.prunable_modules(view)}
    attention = {m: r for m, r in ranks.items() if m in ATTENTION}
    result = decompose_attention(method, view, moments, attention)
    experts = {m: r for m, r in ranks.items() if m in OF_EXPERTS}
    mlp = {m: r for m, r in ranks.items() if m not in attention | experts}
    for decompose, those in ((decompose_mlp, mlp), (decompose_experts, experts)):
        part = decompose(method, view, moments, those) if those else BlockResult()
        for kind in ("modules", "state", "reports", "errors"):
            getattr(result, kind).update(getattr(part, kind))
    replace(view, result, source)
    assert any(isinstance(m, LatentLinear) for m in view.module.modules())
    streams = [start(source, some_ids(), autocast=None) for _ in range(2)]
    advance(view, streams[0])
    advance(source.block(0), streams[1])
    return streams[0].hidden[0], streams[1].hidden[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_full_rank_leaves_the_block_unchanged(family):
    latent, dense = full_rank_block(family)
    torch.testing.assert_close(latent, dense, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("junction", JUNCTIONS)
@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_full_rank_with_every_junction(family, junction):
    latent, dense = full_rank_block(family, junction=junction, joint="none")
    torch.testing.assert_close(latent, dense, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "opt", "gpt2", "phi", "gpt_neox", "falcon-mqa", "gpt_oss"])
def test_full_rank_joint_value_output(family):
    latent, dense = full_rank_block(family, joint="qk,vo" if family != "qwen3" else "vo")
    torch.testing.assert_close(latent, dense, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_counts_cache_and_generation(family, tmp_path):
    source, method = opened(family), method_for(family)
    model = rankfold.compress(source, method=method, calibration=tokens(32)).model
    plan = rankfold.plan(source, method=method)
    assert sum(p.numel() for p in model.parameters()) == plan.parameters_after
    assert plan.sparsity >= method.sparsity

    rankfold.save(model, tmp_path / "small")
    again = rankfold.load(tmp_path / "small", device="cpu")
    assert torch.equal(logits(again), logits(model))

    ids = some_ids()
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(ids)
    cached = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(cached, model.generate(ids, attention_mask=mask, use_cache=False, **options))

    with torch.no_grad():
        cache = filled_cache(model, ids)
    widths = [t.shape[1] * t.shape[3] for layer in cache.layers for t in (layer.keys, layer.values)]
    assert sum(widths) * 4 == plan.kv_bytes_per_token_after


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("junction", JUNCTIONS)
def test_planned_counts_are_the_stored_ones_for_every_junction(family, junction):
    source, method = opened(family, blocks=2), method_for(family, junction=junction, joint="none")
    model = rankfold.compress(source, method=method, calibration=tokens(32)).model
    assert sum(p.numel() for p in model.parameters()) == rankfold.plan(source, method=method).parameters_after


@pytest.mark.parametrize("family", ["opt", "bloom", "llama", "gpt_neox"])
def test_padding_on_the_left_changes_nothing(family):
    model = rankfold.compress(opened(family), method=method_for(family), calibration=tokens(32)).model
    ids = some_ids(1, 12)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones_like(ids)], 1)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(alone[:, 12:], model.generate(padded, attention_mask=mask, **options)[:, 17:])


def test_latents_are_cached_without_rotary_embedding_and_only_values_with_it():
    for family, expected in (("opt", (True, True)), ("llama-mha-tied", (False, True)), ("qwen3", (False, True))):
        model = rankfold.compress(opened(family), method=method_for(family), calibration=tokens(32)).model
        attention = next(m for m in model.modules() if isinstance(m, CompressedAttention))
        assert (attention.latent_keys, attention.latent_values) == expected, family


@pytest.mark.parametrize("kind", JUNCTIONS[:3] + ["plain"])
def test_runtime_never_multiplies_by_the_identity_yet_equals_the_dense_product(kind):
    spec = {"kind": "latent", "in": 12, "out": 10, "rank": 4, "form": kind, "bias": True}
    module = build(spec)
    torch.manual_seed(0)
    for p in module.parameters():
        torch.nn.init.normal_(p)
    for name in ("columns", "rows"):
        if hasattr(module, name):
            getattr(module, name).copy_(torch.randperm(getattr(module, name).numel()))
    x = torch.randn(5, 12)
    dense = module(torch.eye(12)) - module.bias
    torch.testing.assert_close(module(x), x @ dense + module.bias)
    torch.testing.assert_close(module.up(module.down(x)), module.down(x) @ module.up_matrix(x).T + module.shift())
    stored = sum(p.numel() for p in module.parameters()) - 10
    assert stored == (4 * 22 if kind == "plain" else 4 * 22 - 16)
    assert torch.linalg.matrix_rank(dense) == 4


def test_root_covariance_has_the_smallest_measured_error_of_all_preconditioners():
    source = opened("llama")
    view = source.block(0)
    errors = {}
    for kind in ("identity", "hessian", "l1", "l2", "covariance", "rootcov"):
        method = method_for("llama", precondition=kind, joint="none", ridge=1e-9)
        moments = measure(view, start(source, tokens(32).ids, autocast=None), method.statistics(view), step=False)
        ranks = {u.module: u.ranks[len(u.ranks) // 2] for u in method.prunable_modules(view)}
        errors[kind] = {m: r["relative_error"] for m, r in method.decompose(view, moments, ranks).reports.items()}
    for kind, values in errors.items():
        for module, value in values.items():
            assert errors["rootcov"][module] <= value * (1 + 1e-6), (kind, module)


@pytest.mark.parametrize("name", ["rootcov", "svd-llm", "asvd", "fwsvd", "svd"])
def test_local_methods_run_and_are_local(name):
    source = opened("opt")
    model = rankfold.compress(
        source, method=rankfold.make_method(name, sparsity=0.3, rank_multiple=1), calibration=tokens(32)
    ).model
    assert torch.isfinite(logits(model)).all()
    assert model.config.quantization_config.fields["method"] == name


@pytest.mark.parametrize(
    "family, options, error, message",
    [
        ("qwen3", {"joint": "qk"}, UnsupportedModelError, "qwen3 cannot take the joint form 'qk'.*normalises"),
        ("llama", {"joint": "ud"}, UnsupportedModelError, "llama cannot take the joint form 'ud'.*without gate"),
        ("gpt2", {"joint": "ud"}, UnsupportedModelError, "gpt2 cannot take the joint form 'ud'.*ReLU"),
        *(("opt", {"joint": pair, "bias_refit": False}, UnsupportedModelError, f"'{pair}'.*biases") for pair in JOINT),
        (
            "qwen2",
            {"joint": "vo", "attention_aware": True},
            UnsupportedModelError,
            "qwen2.*attention_aware.*leave it out",
        ),
        ("opt", {"modules": ("gate",)}, UnsupportedModelError, "opt has no module 'gate'.*it has: q,k,v,o,up,down"),
        ("opt", {"sparsity": 0.999}, OptionError, "cannot be reached"),
        ("opt", {"condition_limit": 1.0}, NumericsError, r"model.decoder.layers.0.*condition number.*use kind"),
    ],
)
def test_what_cannot_be_done_is_said(family, options, error, message):
    with pytest.raises(error, match=message):
        rankfold.compress(opened(family), method=method_for(family, **options), calibration=tokens(32))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"junction": "identity"}, "unknown junction 'identity'.*available"),
        ({"precondition": "root"}, "unknown precondition 'root'; did you mean 'rootcov'"),
        ({"joint": "qv"}, "unknown joint 'qv'"),
        ({"attention_aware": True}, "use joint=vo, got 'auto'"),
        ({"alternations": 0}, "alternations must be >= 1"),
        ({"window": -1}, "window must be >= 0"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(OptionError, match=message):
        LatentLLM(**options)
