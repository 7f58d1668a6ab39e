"""Multiply-accumulates: PyTorch's counter against the closed formula, which is checked by numbers written out."""

import pytest
import torch

import rankfold
from families import tiny_model
from rankfold.errors import OptionError, UnsupportedModelError
from rankfold.evaluation.complexity import cache_bytes, complexity, counted_macs, formula_macs, planned_macs

T = 16
METHODS = {
    "modegpt": {"rank_multiple": 2},
    "latentllm": {"rank_multiple": 2},
    "rootcov": {"rank_multiple": 2, "junction": "block_identity_left"},
    "svd-llm": {"rank_multiple": 2},
    "flap": {"rank_multiple": 2},
    "shortgpt": {},
}


def compressed(family: str, method: rankfold.methods.Method):
    """Dense source, plan and compressed model."""
    source = rankfold.open_model(tiny_model(family))
    ids = torch.randint(3, 96, (8, 24), generator=torch.Generator().manual_seed(0))
    moments = rankfold.calibrate(source, rankfold.CalibrationData(ids, "random", "random", 0))
    return (
        source,
        rankfold.plan(source, method=method, moments=moments),
        rankfold.compress(source, method=method, moments=moments).model,
    )


def test_dense_llama_by_hand():
    """d = 32, F = 48, 3 blocks, 4 query and 2 key heads of 8, vocabulary 96."""
    model = tiny_model("llama")
    linear = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * 96
    found = formula_macs(model, T)
    assert found["linear"] == T * linear
    assert found["attention"] == T * T * 3 * 4 * (8 + 8)
    assert found["total"] == counted_macs(model, T)


def test_dense_opt_by_hand():
    """d = 32, F = 48, 3 blocks, 4 heads of 8, vocabulary 96, tied head."""
    model = tiny_model("opt")
    found = formula_macs(model, T)
    assert found == {
        "linear": T * (3 * (4 * 32 * 32 + 2 * 32 * 48) + 32 * 96),
        "attention": T * T * 3 * 4 * 16,
        "total": counted_macs(model, T),
    }


@pytest.mark.parametrize(
    "family",
    ["llama", "llama-mha-tied", "llama-bias", "opt", "gpt2", "gpt_neox", "phi3", "gemma3-images", "falcon-gqa"],
)
def test_counter_equals_formula_on_dense_models(family):
    model = tiny_model(family)
    assert counted_macs(model, T) == formula_macs(model, T)["total"]


@pytest.mark.parametrize("sparsity", [0.2, 0.6])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_counter_equals_formula_equals_plan(family, method, sparsity):
    chosen = rankfold.make_method(method, sparsity=sparsity, **METHODS[method])
    source, plan, model = compressed(family, chosen)
    formula = formula_macs(model, T)
    assert counted_macs(model, T) == formula["total"]
    assert planned_macs(source, plan, T) == formula
    assert formula["linear"] < formula_macs(source.model, T)["linear"]
    assert cache_bytes(model) == plan.kv_bytes_per_token_after


@pytest.mark.parametrize("share", [0.2, 1.0])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_sparse_value_is_one_multiplication(family, share):
    source, plan, model = compressed(family, rankfold.LatentLLM(sparsity=0.3, sparse=share, rank_multiple=2))
    formula = formula_macs(model, T)
    assert counted_macs(model, T) == formula["total"] == planned_macs(source, plan, T)["total"]


@pytest.mark.parametrize("options", [{"junction": "lu"}, {"head_junction": True}], ids=["lu", "head_junction"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_what_a_junction_does_not_store_is_multiplied_all_the_same(family, options):
    modules = ("v", "o", "gate", "up", "down") if family == "llama" else None  # no identity in heads of rotated keys
    chosen = rankfold.LatentLLM(sparsity=0.3, modules=modules, rank_multiple=2, **options)
    source, plan, model = compressed(family, chosen)
    assert counted_macs(model, T) == formula_macs(model, T)["total"]
    with pytest.raises(OptionError, match="do not follow from the weights stored"):
        planned_macs(source, plan, T)


def test_a_shared_basis_is_multiplied_in_every_block():
    chosen = rankfold.make_method("basis-sharing", sparsity=0.3, rank_multiple=2)
    source, plan, model = compressed("llama", chosen)
    assert counted_macs(model, T) == formula_macs(model, T)["total"]
    with pytest.raises(OptionError, match="do not follow from the weights stored"):
        planned_macs(source, plan, T)


def test_zeros_are_multiplied():
    source, plan, model = compressed("llama", rankfold.make_method("wanda"))
    dense = formula_macs(source.model, T)
    assert counted_macs(model, T) == formula_macs(model, T)["total"] == dense["total"]
    assert planned_macs(source, plan, T) == dense


def test_complexity_says_what_the_parts_say():
    model = tiny_model("llama")
    found, parts = complexity(model, tokens=T), formula_macs(model, T)
    assert found["macs_per_token"] * T == parts["total"]
    assert found["flops_per_token"] == 2 * found["macs_per_token"]
    assert found["linear_macs_per_token"] * T == parts["linear"]
    assert found["attention_macs_per_token"] * T == parts["attention"]
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["kv_bytes_per_token"] == 3 * 2 * 2 * 8 * 4  # blocks, keys and values, key heads, head dimension, fp32


def test_the_attention_implementation_is_put_back():
    model = tiny_model("llama")
    before = model.config._attn_implementation
    counted_macs(model, T)
    assert model.config._attn_implementation == before


def test_experts_are_refused():
    with pytest.raises(UnsupportedModelError, match="routes tokens to experts"):
        formula_macs(tiny_model("mixtral"), T)
