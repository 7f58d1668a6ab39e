"""What must hold where SliceGPT and MoDeGPT are combined.

The reference is the dense model with the smaller modules MoDeGPT put into it, its stream projected (projected.py).
"""

import json

import pytest
import torch

import rankfold
from activations import blocks_of
from families import cached_numbers, some_ids, tokens
from projected import PARALLEL, Projected, logits, opened, varied
from rankfold import MoDeGPT, make_method
from rankfold.errors import OptionError, UnsupportedModelError
from rankfold.evaluation.complexity import counted_macs, formula_macs, planned_macs
from rankfold.modules import CompressedAttention, install

# Grouped queries with and without biases, fused projections, no rotation, ALiBi, head norms, parallel blocks, pairs.
FAMILIES = (
    "bloom",
    "cohere",
    "falcon-gqa",
    "glm",
    "gpt2",
    "llama",
    "llama-bias",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


def method(**options):
    return make_method("slicegpt+modegpt", **{"sparsity": 0.4, "rank_multiple": 2, "slicing": 0.25} | options)


@pytest.fixture(scope="module")
def run(family, tmp_path_factory):
    """Plan, folder, the model read back from it, and what MoDeGPT made of every block."""
    plans, parts, folder = [], {}, tmp_path_factory.mktemp("combined") / "small"
    decompose = MoDeGPT.decompose

    def noted(self, view, *args):
        parts[view.path] = decompose(self, view, *args)
        return parts[view.path]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoDeGPT, "decompose", noted)
        rankfold.compress(opened(family), method=method(), calibration=tokens(), output=folder, on_plan=plans.append)
    return plans[0], folder, rankfold.load(folder, device="cpu"), parts


def test_it_computes_what_the_smaller_modules_do_in_a_projected_stream(run, family):
    plan, _, model, parts = run
    reference = varied(family)
    install(reference, {f"{path}.{name}": spec for path, part in parts.items() for name, spec in part.modules.items()})
    state = {f"{path}.{name}": tensor for path, part in parts.items() for name, tensor in part.state.items()}
    assert not reference.load_state_dict(state, strict=False, assign=True).unexpected_keys
    reference = Projected(reference.eval(), plan.facts["rank"], parallel=family in PARALLEL)
    torch.testing.assert_close(logits(model), logits(reference.model), rtol=1e-3, atol=2e-4)


def test_planned_equals_actual_and_the_budget_holds(run, family):
    plan, folder, model, _ = run
    assert plan.facts["rank"] == 24 and plan.facts["nominal_sparsity"] == 0.25
    assert sum(p.numel() for p in model.parameters()) == plan.parameters_after
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == plan.bytes_after
    assert cached_numbers(model) * 4 == plan.kv_bytes_per_token_after < plan.kv_bytes_per_token
    weights = sum(p.numel() for p in blocks_of(model).parameters() if p.dim() == 2)
    assert plan.counted_weights - plan.removed_weights == weights
    assert 0.4 <= plan.sparsity < 0.41
    formula = formula_macs(model, 16)
    assert planned_macs(opened(family), plan, 16) == formula
    if not family.startswith("falcon"):  # the counter cannot see into its fused attention
        assert counted_macs(model, 16) == formula["total"]


def test_reloads_and_generates_with_cache(run, family, tmp_path):
    again = rankfold.load(run[1], device="cpu")
    model = rankfold.compress(opened(family), method=method(), calibration=tokens()).model
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "twice")
    assert torch.equal(logits(rankfold.load(tmp_path / "twice", device="cpu")), logits(model))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(some_ids())
    found = [model.generate(some_ids(), attention_mask=mask, use_cache=use, **options) for use in (True, False)]
    assert torch.equal(*found)


def test_the_record_has_every_module_and_its_error(run, family):
    blocks = json.loads((run[1] / "rankfold.json").read_text())["blocks"]
    expected = {"stream", "mlp", "vo"} | (set() if family == "qwen3" else {"qk"})
    for block in blocks.values():
        assert block.keys() == expected
        assert all(0 < report["held_out_error"] < 1 for report in block.values())


def test_sparsity_zero_leaves_the_logits_unchanged():
    source = opened("llama")
    assert torch.equal(
        logits(rankfold.compress(source, method=method(sparsity=0.0), calibration=tokens()).model), logits(source.model)
    )


def test_every_module_can_have_its_own_sparsity():
    """Slice-MLP-MHA of the paper's Table 22, where the latter are of what slicing leaves."""
    source, plans = opened("llama"), []
    chosen = method(modules={"mlp": 0.5, "qk": 0.25, "vo": 0.25})
    model = rankfold.compress(source, method=chosen, calibration=tokens(), on_plan=plans.append).model
    assert [plans[0].ranks(0)[module] for module in ("stream", "mlp", "qk", "vo")] == [24, 24, 6, 6]
    assert sum(p.numel() for p in model.parameters()) == plans[0].parameters_after
    attention = next(m for m in model.modules() if isinstance(m, CompressedAttention))
    assert (attention.qk_dim, attention.vo_dim, attention.q_proj.in_features) == (6, 6, 24)


def test_attention_that_modegpt_leaves_alone_is_sliced_and_counted():
    source, plans = opened("opt"), []
    model = rankfold.compress(
        source, method=method(modules=("mlp",), sparsity=0.3), calibration=tokens(), on_plan=plans.append
    ).model
    assert sum(p.numel() for p in model.parameters()) == plans[0].parameters_after
    assert plans[0].sparsity >= 0.3 and plans[0].ranks(1).keys() == {"stream", "mlp"}


def test_influence_allocations_go_around_the_slicing():
    source, plans = opened("llama"), []
    model = rankfold.compress(
        source, method=method(allocation="influence"), calibration=tokens(), on_plan=plans.append
    ).model
    assert sum(p.numel() for p in model.parameters()) == plans[0].parameters_after and plans[0].sparsity >= 0.4
    assert {plans[0].ranks(index)["stream"] for index in range(3)} == {24}
    assert len({plans[0].ranks(index)["mlp"] for index in range(3)}) > 1


def test_little_slicing_costs_more_than_it_saves_and_the_rest_makes_up_for_it():
    plan = rankfold.plan(opened("llama"), method=method(slicing=0.1))
    stream = next(m for m in plan.modules if m.module == "stream")
    assert stream.rank == 28 and stream.weights > stream.dense_weights and plan.sparsity >= 0.4


def test_refusals():
    with pytest.raises(OptionError, match=r"slicing must be in \(0, 1\), got 1.0"):
        method(slicing=1.0)
    with pytest.raises(OptionError, match="gives several blocks one width, basis or number of experts"):
        method(exclude_blocks=(1,))
    with pytest.raises(OptionError, match="takes budget parameters, got flops"):
        method(budget="flops")
    with pytest.raises(
        UnsupportedModelError, match="slicegpt\\+modegpt cannot take this gemma2: a norm or a factor follows"
    ):
        rankfold.plan(opened("gemma2"), method=method())
    with pytest.raises(OptionError, match=r"sparsity 0.99 cannot be reached: .* sparsity 0\.6895"):
        rankfold.plan(opened("llama"), method=method(sparsity=0.99))
