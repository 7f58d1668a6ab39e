"""Ranks for what is to run the result: those it can take, at the sparsity asked for, and nothing padded there."""

import pytest
import torch
import transformers as t

import rankfold
from families import opened, tokens
from rankfold.errors import CheckpointError, OptionError, UnsupportedModelError
from rankfold.exports import export
from rankfold.methods import Rankfold, make_method


def wide_model(hidden: int = 64, units: int = 192, head_dim: int = 64):
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": units, "head_dim": head_dim, "vocab_size": 96}
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1))


def source(**sizes):
    return rankfold.open_model(wide_model(**sizes), device="cpu")


def ranks(plan) -> dict[str, set[int]]:
    """Module -> ranks below the full one."""
    found = {}
    for m in plan.modules:
        found.setdefault(m.module, set()).update({m.rank} - {m.of})
    return found


@pytest.mark.parametrize(
    "name, sparsity", [("modegpt", 0.2), ("modegpt", 0.3), ("modegpt", 0.45), ("latentllm", 0.2), ("latentllm", 0.3)]
)
def test_vllm_has_head_sizes_of_its_kernels(name, sparsity):
    plan = rankfold.plan(source(), method=make_method(name, target="vllm", sparsity=sparsity))
    assert plan.sparsity >= sparsity
    found = ranks(plan)
    assert found.pop("qk", set()) | found.pop("vo", set()) <= {32, 48}
    assert all(rank % 32 == 0 for some in found.values() for rank in some)


@pytest.mark.parametrize("sizes, step", [({}, 32), ({"hidden": 256, "units": 1536}, 256), ({"units": 1536}, 32)])
def test_llama_cpp_has_dense_heads_and_whole_blocks_of_quantised_numbers(sizes, step):
    plan = rankfold.plan(source(**sizes), method=make_method("modegpt", target="llama.cpp", sparsity=0.3))
    found = ranks(plan)
    assert found.keys() == {"mlp"} and found["mlp"] and all(rank % step == 0 for rank in found["mlp"])
    assert plan.sparsity >= 0.3


def test_stock_has_one_width_and_its_export_has_no_number_more(tmp_path):
    method = Rankfold(target="stock", sparsity=0.3, allocation="uniform")
    folder = rankfold.compress(source(), method=method, calibration=tokens(32), output=tmp_path / "small").output
    made = export(folder, tmp_path / "stock")
    assert made.exported == made.compressed < made.dense
    config = t.AutoConfig.from_pretrained(tmp_path / "stock")
    assert config.intermediate_size % method.rank_multiple == 0 and config.intermediate_size < 192


def test_llama_cpp_loses_nothing_as_deci(tmp_path):
    method = make_method("modegpt", target="llama.cpp", sparsity=0.3)
    folder = rankfold.compress(source(), method=method, calibration=tokens(32), output=tmp_path / "small").output
    made = export(folder, tmp_path / "deci", format="deci")
    assert made.exported == made.compressed < made.dense


@pytest.mark.parametrize("name", ["rankfold", "modegpt"])
def test_heads_of_one_width_and_the_same_pairs_lose_nothing_in_a_stock_model(name, tmp_path):
    method = make_method(name, target="stock", sparsity=0.4, allocation="uniform", head_dim=24)
    folder = rankfold.compress(source(), method=method, calibration=tokens(32), output=tmp_path / "small").output
    made = export(folder, tmp_path / "stock")
    assert made.exported == made.compressed < made.dense and made.difference < 1e-5
    model = t.AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert model.config.head_dim == 24 and model.config.rope_parameters["rope_type"] == "longrope"
    ids = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, small = (m.eval()(ids).logits for m in (model, rankfold.load(folder, device="cpu")))
    torch.testing.assert_close(found, small, rtol=1e-4, atol=1e-5)


def test_every_mlp_has_its_own_width_around_them_for_llama_cpp(tmp_path):
    method = make_method("rankfold", target="llama.cpp", sparsity=0.4, head_dim=24)
    folder = rankfold.compress(source(), method=method, calibration=tokens(32), output=tmp_path / "small").output
    made = export(folder, tmp_path / "deci", format="deci")
    assert made.exported == made.compressed < made.dense


def test_the_width_of_heads_is_the_same_whatever_the_rest_must_give():
    """It takes its share first; what is asked beyond that goes elsewhere, and nothing where nothing is asked."""
    found = {
        s: ranks(rankfold.plan(source(), method=make_method("modegpt", head_dim=24, sparsity=s))) for s in (0, 0.2, 0.6)
    }
    assert found[0] == {"mlp": set(), "qk": set(), "vo": set()}
    assert found[0.2]["qk"] == found[0.2]["vo"] == found[0.6]["qk"] == found[0.6]["vo"] == {24}
    assert found[0.2]["mlp"] == set() and max(found[0.6]["mlp"]) < 192


def test_pairs_of_the_model_are_those_of_saved_moments_too(tmp_path):
    """Measured on the way, or before: in one pass they are the same, and so is all that is made of them."""
    method = make_method("modegpt", head_dim=24, sparsity=0.4)
    moments = rankfold.calibrate(source(), tokens(32), tmp_path / "moments")
    both = (
        rankfold.compress(source(), method=method, moments=moments).model,
        rankfold.compress(source(), method=method, calibration=tokens(32), mode="one-pass").model,
    )
    states = [model.state_dict() for model in both]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    predicted = rankfold.plan(source(), method=method, moments=moments).modules
    assert all(m.relative_error > 0 for m in predicted if m.rank < m.of)


def test_moments_without_what_all_blocks_choose_by_are_refused(tmp_path):
    moments = rankfold.calibrate(source(), tokens(32), statistics={"query", "key", "value", "mlp_hidden"})
    with pytest.raises(CheckpointError, match="lack query_key; calibrate again"):
        rankfold.compress(source(), method=make_method("modegpt", head_dim=24), moments=moments)


def test_a_sparsity_out_of_reach_says_that_the_target_is_why():
    for modules, more in ((None, ","), (("mlp",), ", compress more modules,")):
        method = make_method("modegpt", target="llama.cpp", sparsity=0.7, modules=modules)
        with pytest.raises(OptionError, match=f"; lower the sparsity{more} or leave out target='llama.cpp'$"):
            rankfold.compress(source(), method=method, calibration=tokens(32))


def test_multiple_and_target_hold_together():
    plan = rankfold.plan(source(), method=make_method("modegpt", target="vllm", rank_multiple=12, sparsity=0.3))
    found = ranks(plan)
    assert found["mlp"] <= {96} and found["qk"] | found["vo"] <= {48}


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("rankfold", {"target": "llamacpp"}, "unknown target 'llamacpp'; did you mean 'llama.cpp'"),
        ("latentllm", {"target": "stock"}, "method latentllm writes for transformers, vllm, got target='stock'"),
        ("slicegpt", {"target": "vllm"}, "method slicegpt writes for transformers, got target='vllm'"),
        (
            "slicegpt+modegpt",
            {"target": "vllm"},
            r"method slicegpt\+modegpt writes for transformers, got target='vllm'",
        ),
        ("rankfold", {"target": "stock"}, "gives all MLPs one width, got allocation measured; take allocation uniform"),
        (
            "modegpt",
            {"target": "stock", "exclude_blocks": (0,)},
            r"gives all MLPs one width, got exclude_blocks \(0,\); leave it out",
        ),
        ("modegpt", {"head_dim": 7}, "head_dim must be even and >= 0, got 7"),
        ("modegpt", {"head_dim": 8, "modules": ("mlp", "vo")}, "got modules mlp,vo; name qk and vo among them"),
        ("modegpt", {"head_dim": 8, "modules": {"qk": 0.2, "vo": 0.3}}, "got modules qk,vo; name qk and vo among them"),
        (
            "modegpt",
            {"head_dim": 8, "exclude_blocks": (0,)},
            r"head_dim 8 is of all blocks, got exclude_blocks \(0,\); drop one",
        ),
        (
            "modegpt",
            {"head_dim": 8, "selection_qk": "norm"},
            "by the error of the scores, got selection_qk=norm; drop one",
        ),
    ],
)
def test_what_cannot_be_is_refused(name, options, message):
    with pytest.raises(OptionError, match=message):
        make_method(name, **options)


@pytest.mark.parametrize(
    "family, options, error, message",
    [
        ("llama", {"head_dim": 8}, OptionError, "head_dim must be below the model's 8, got 8"),
        ("llama", {"head_dim": 4, "target": "vllm"}, OptionError, "multiples of 16 from 32 on, got head_dim 4"),
        ("qwen3", {"head_dim": 4}, UnsupportedModelError, "and qwen3 gives mlp,vo only; leave head_dim out"),
        ("opt", {"head_dim": 4, "target": "stock"}, OptionError, "head_dim 4 has no place in a stock opt: its class"),
        ("helium", {"head_dim": 4, "target": "stock"}, OptionError, "head_dim 4 has no place in a stock helium"),
        (
            "smollm3",
            {"head_dim": 4, "target": "stock"},
            OptionError,
            "or not all of a head turns alike; leave head_dim",
        ),
    ],
)
def test_a_width_of_heads_that_cannot_be_is_refused(family, options, error, message):
    with pytest.raises(error, match=message):
        rankfold.plan(opened(family), method=make_method("modegpt", **options))


@pytest.mark.parametrize("modules", [("qk", "mlp"), {"mlp": 0.3, "vo": 0.2}])
def test_heads_asked_for_by_name_are_refused_where_the_target_has_dense_ones(modules):
    with pytest.raises(
        OptionError, match=r"heads as many and as wide as the dense ones, got module '(qk|vo)'; leave it out"
    ):
        rankfold.plan(opened("llama"), method=make_method("modegpt", target="llama.cpp", modules=modules))
