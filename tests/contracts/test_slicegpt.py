"""What must hold for SliceGPT on every family, against the stock model with a projected stream (projected.py)."""

import json
import re

import pytest
import torch
import transformers as t
from torch import nn

import rankfold
from activations import blocks_of
from families import ALIKE, CONFIGS, EXPERTS, GQA, cached_numbers, some_ids, tiny_model, tokens
from interrupted import assert_ends_in_the_same_bytes
from projected import PARALLEL, Projected, logits, opened, varied
from rankfold import make_method
from rankfold.allocation import Bytes, FLOPs
from rankfold.architectures import BlockView
from rankfold.errors import OptionError, UnsupportedModelError
from rankfold.evaluation.complexity import counted_macs, formula_macs, planned_macs
from rankfold.exports.reading import read_heads
from rankfold.methods.baselines.slicegpt.block import Bases, put_block
from rankfold.methods.baselines.slicegpt.converted import Converted
from rankfold.modules import install
from saved import assert_reloads

# What attention and MLP send is normalised or scaled before it is in the stream.
BEHIND = {"gemma2", "gemma3", "gemma3-images", "opt-post-norm", "olmo2", "olmo3", "exaone4", "granite", "glm4"}
TAKEN = sorted(CONFIGS.keys() - EXPERTS - BEHIND)
# Of families that are alike to other methods those whose norms or activations have something of their own.
KINDS = [family for family in TAKEN if family not in ALIKE - {"apertus", "nemotron", "stablelm-parallel"}]


def method(**options):
    return make_method("slicegpt", **{"sparsity": 0.2, "rank_multiple": 2} | options)


@pytest.fixture(scope="module", params=KINDS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def run(family, tmp_path_factory):
    """Plan, folder and the model read back from it."""
    plans, folder = [], tmp_path_factory.mktemp("slicegpt") / "small"
    rankfold.compress(opened(family), method=method(), calibration=tokens(), output=folder, on_plan=plans.append)
    return plans[0], folder, rankfold.load(folder, device="cpu")


@torch.no_grad()
def rotated(family: str) -> nn.Module:
    """The model in RMS form, in other coordinates of full width at every place, in fp64."""
    model, modules, state = varied(family).double(), {}, {}
    source, blocks = rankfold.open_model(varied(family).double(), device="cpu"), blocks_of(model)
    bases = [torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64))[0] for _ in range(2 * len(blocks) + 1)]
    for index in range(len(blocks)):
        view, here = source.meta_block(index), Bases(*bases[2 * index : 2 * index + 3])
        ends = {"enters": index == 0, "leaves": index == len(blocks) - 1}
        result = put_block(Converted.of(view, view.attention), view, here, **ends)
        modules |= {f"{view.path}.{path}".rstrip("."): spec for path, spec in result.modules.items()}
        state |= {f"{view.path}.{name}": tensor for name, tensor in result.state.items()}
    install(model, modules)
    assert set(state) <= set(model.state_dict())
    model.load_state_dict(state, strict=False, assign=True)
    return model.eval()


@pytest.mark.parametrize("family_", TAKEN)
def test_rms_form_computes_the_same_in_any_coordinates(family_):
    found, expected = rotated(family_), varied(family_).double()
    torch.testing.assert_close(logits(found), logits(expected), rtol=1e-5, atol=1e-5)
    assert not [name for name, _ in blocks_of(found)[0].named_children() if "norm" in name or name.startswith("ln_")]


def test_it_computes_what_the_dense_model_with_a_projected_stream_does(run, family):
    plan, folder, model = run
    reference = Projected(varied(family), plan.facts["rank"], parallel=family in PARALLEL)
    torch.testing.assert_close(logits(model), logits(reference.model), rtol=1e-3, atol=2e-4)
    blocks = json.loads((folder / "rankfold.json").read_text())["blocks"]
    for (index, place), error in reference.errors.items():
        key = "relative_error" if place == "output" else f"{place}_error"
        assert blocks[str(index)]["stream"][key] == pytest.approx(error, rel=1e-3)
    for index in range(3):
        assert blocks[str(index)]["stream"]["held_out_error"] == pytest.approx(
            reference.held_out[index, "output"], rel=1e-3
        )


def test_planned_equals_actual_and_the_budget_holds(run, family):
    plan, folder, model = run
    assert sum(p.numel() for p in model.parameters()) == plan.parameters_after < plan.parameters
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == plan.bytes_after
    assert cached_numbers(model) * 4 == plan.kv_bytes_per_token_after
    weights = sum(p.numel() for p in blocks_of(model).parameters() if p.dim() == 2)
    assert plan.counted_weights - plan.removed_weights == weights
    assert plan.sparsity >= 0.2


def test_the_width_is_the_largest_with_which_the_budget_holds_and_less_goes_than_is_sliced(run, family):
    plan, _, model = run
    rank = plan.facts["rank"]
    assert plan.facts["nominal_sparsity"] == 1 - rank / 32 > plan.sparsity
    assert {m.rank for m in plan.modules} == {rank}
    wider = rankfold.plan(opened(family), method=method(sparsity=plan.sparsity - 1e-4))
    assert wider.facts["rank"] == rank
    assert rankfold.plan(opened(family), method=method(sparsity=plan.sparsity + 1e-4)).facts["rank"] == rank - 2
    for block in blocks_of(model):
        assert block.shortcut.weight.shape == (rank, rank)


@pytest.mark.kinds
def test_folder_and_memory_and_saving_twice_give_the_same_model(run, family, tmp_path):
    folder, model = run[1], rankfold.compress(opened(family), method=method(), calibration=tokens()).model
    assert_reloads(folder, model, tmp_path / "twice")
    assert not list(folder.glob("basis-*"))


def test_generation_with_cache_equals_without_and_padding_changes_nothing(run):
    model, ids = run[2], some_ids()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with_cache, without = (
        model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=use, **options) for use in (True, False)
    )
    assert torch.equal(with_cache, without)
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(2, 5, dtype=torch.long), torch.ones_like(ids)], 1)
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 5:], with_cache)


def test_half_precision_runs(run, family):
    folder, expected = run[1], logits(run[2])
    for dtype in (torch.bfloat16, torch.float16):
        low = logits(rankfold.load(folder, device="cpu").to(dtype)).float()
        assert torch.isfinite(low).all() and (low - expected).abs().max() < 0.15 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_compressed_in_it(dtype, tmp_path, monkeypatch):
    """As on a GPU: the blocks compute in what they are stored in, also while the checkpoint is checked."""
    monkeypatch.setattr("rankfold.models.devices.multiplies_bf16_fast", lambda: True)
    folder = rankfold.compress(
        rankfold.open_model(tiny_model("llama").to(dtype)),
        method=method(),
        calibration=tokens(),
        output=tmp_path / "small",
    ).output
    assert rankfold.load(folder, device="cpu").dtype == dtype


def test_sparsity_zero_leaves_the_logits_unchanged(family):
    source = opened(family)
    assert torch.equal(
        logits(rankfold.compress(source, method=method(sparsity=0.0), calibration=tokens()).model), logits(source.model)
    )


def test_gradients_flow_and_checkpointing_gives_the_same_ones(run):
    _, folder, _ = run
    found = []
    for checkpointing in (False, True):
        model = rankfold.load(folder, device="cpu").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(0)  # of dropout
        model(some_ids(), labels=some_ids()).loss.backward()
        found.append([block.shortcut.weight.grad for block in blocks_of(model)])
    for plain, checked in zip(*found, strict=True):
        assert plain.norm() > 0
        torch.testing.assert_close(plain, checked)


@pytest.mark.parametrize("family_", ["llama", "opt", "phi3"])
def test_compiled_forward_agrees(family_):
    model = rankfold.compress(opened(family_, blocks=2), method=method(), calibration=tokens()).model
    expected = logits(model)
    torch.testing.assert_close(logits(torch.compile(model, backend="eager", fullgraph=True)), expected)


@pytest.mark.parametrize("family_", ["llama", "gpt_neox"])
def test_interrupted_runs_end_in_the_same_bytes(family_, tmp_path, monkeypatch):
    assert_ends_in_the_same_bytes(
        lambda folder: rankfold.compress(opened(family_), method=method(), calibration=tokens(), output=folder).output,
        tmp_path,
        monkeypatch,
    )


def test_multiply_accumulates_are_those_of_the_plan(run, family):
    plan, _, model = run
    formula = formula_macs(model, 16)
    assert planned_macs(opened(family), plan, 16) == formula
    if not family.startswith("falcon"):  # the counter cannot see into its fused attention
        assert counted_macs(model, 16) == formula["total"]


@pytest.mark.parametrize("family_", ["llama-bias", "opt", "falcon-mqa"])
def test_other_budgets_hold(family_, tmp_path):
    for budget in ("bytes", "flops"):
        plans, chosen = [], method(budget={"bytes": Bytes(), "flops": FLOPs(context=16)}[budget], scope="model")
        rankfold.compress(
            opened(family_), method=chosen, calibration=tokens(), output=tmp_path / budget, on_plan=plans.append
        )
        assert plans[0].budget["removed"] >= 0.2 * plans[0].budget["counted"]
    size = json.loads((tmp_path / "bytes" / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert size <= 0.8 * 4 * sum(p.numel() for p in varied(family_).parameters())
    macs = formula_macs(rankfold.load(tmp_path / "flops", device="cpu"), 16)["total"]
    assert macs <= 0.8 * formula_macs(varied(family_), 16)["total"]


def test_options_change_the_width():
    def plan(**options):
        return rankfold.plan(opened("llama"), method=method(**options))

    usual, coarse, whole = plan(), plan(rank_multiple=5), plan(scope="model")
    assert coarse.facts["rank"] % 5 == 0 and coarse.facts["rank"] + 5 > usual.facts["rank"]
    assert whole.counted_weights == whole.parameters and whole.facts["rank"] < usual.facts["rank"]
    assert plan(modules={"stream": 0.2}, sparsity=0.7).ranks(0) == plan(modules=("stream",)).ranks(0) == usual.ranks(0)
    with pytest.raises(OptionError, match="method slicegpt takes allocation uniform, got influence"):
        method(allocation="influence")


@pytest.mark.parametrize("family_", sorted(EXPERTS))
def test_experts_are_refused(family_):
    with pytest.raises(UnsupportedModelError, match="slicegpt cannot take this .*: its MLP is a mixture of experts"):
        rankfold.plan(rankfold.open_model(tiny_model(family_)), method=method())


@pytest.mark.parametrize("family_", sorted(BEHIND))
def test_norms_behind_the_halves_are_refused(family_):
    with pytest.raises(UnsupportedModelError, match="slicegpt cannot take this .*: a norm or a factor follows"):
        rankfold.plan(rankfold.open_model(tiny_model(family_)), method=method())


def test_bloom_with_a_normalised_residual_is_refused():
    config = t.BloomConfig(
        hidden_size=32, n_layer=2, n_head=4, vocab_size=96, apply_residual_connection_post_layernorm=True
    )
    with pytest.raises(UnsupportedModelError, match="slicegpt cannot take this bloom: a norm or a factor follows"):
        rankfold.plan(rankfold.open_model(t.BloomForCausalLM(config)), method=method())


def test_a_spec_that_says_nothing_of_its_norms_is_refused():
    torch.manual_seed(0)
    source = rankfold.open_model(t.AutoModelForCausalLM.from_config(t.MinistralConfig(**GQA, head_dim=8)))
    with pytest.raises(
        UnsupportedModelError, match="cannot take this ministral: its spec does not say how its norms work"
    ):
        rankfold.plan(source, method=method())


def test_norms_of_the_heads_stay():
    config = t.PhiConfig(**CONFIGS["phi"]().to_dict() | {"qk_layernorm": True})
    torch.manual_seed(0)
    source = rankfold.open_model(t.PhiForCausalLM(config), device="cpu")
    source.autocast = None
    plans = []
    model = rankfold.compress(source, method=method(sparsity=0.1), calibration=tokens(), on_plan=plans.append).model
    assert sum(p.numel() for p in model.parameters()) == plans[0].parameters_after
    norm = blocks_of(model)[0].self_attn.q_norm
    assert torch.equal(norm.weight, source.blocks[0].self_attn.q_layernorm.weight)


def test_stock_forms_refuse_a_stream_that_changes_its_width():
    source = opened("llama")
    model = rankfold.compress(source, method=method(), calibration=tokens()).model
    view = BlockView(source.architecture, 1, blocks_of(model)[1], model.config)
    with pytest.raises(
        UnsupportedModelError, match=r"model.layers.1 changes the width of its stream, which no stock block"
    ):
        read_heads(view, 8)


def test_no_block_can_be_protected_and_moments_are_not_enough():
    with pytest.raises(OptionError, match=r"none can be excluded, got \(0,\); leave exclude_blocks out"):
        method(exclude_blocks=(0,))
    source = opened("llama")
    with pytest.raises(OptionError, match="takes text and mode sequential, not moments"):
        rankfold.compress(source, method=method(), moments=rankfold.calibrate(source, tokens()))


def test_a_warning_suggests_nothing_that_is_refused(monkeypatch):
    monkeypatch.setattr("rankfold.compression.held_out.explained_ratio", lambda sparsity: 1e-3)
    small = rankfold.compress(opened("llama"), method=method(), calibration=tokens()).model
    warning = small.config.quantization_config.fields["held_out"]["warning"]
    assert re.search(r"breaks away at block \d\. Lower the sparsity, or calibrate on more text", warning)


def test_what_cannot_be_reached_is_said():
    with pytest.raises(OptionError, match=r"sparsity 0.97 cannot be reached: .* sparsity 0\.9[0-6]"):
        rankfold.compress(opened("llama"), method=method(sparsity=0.97), calibration=tokens())
