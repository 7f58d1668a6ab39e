"""What must hold for MoDeGPT on every family; a new family adds one line to `families.CONFIGS`."""

import copy

import pytest
import torch
import transformers as t

import rankfold
from families import CONFIGS, EXPERTS, NORMED, SHAPE, cached_numbers, named, opened, some_ids, tiny_model, tokens
from rankfold import MoDeGPT
from rankfold.calibration.runner import advance, measure, start
from rankfold.compression.replace import replace
from rankfold.errors import UnsupportedModelError
from rankfold.methods.base import BlockResult
from rankfold.methods.modegpt.norms import SQUARES, predict_norms
from rankfold.methods.result import put_attention
from rankfold.modules import CompressedAttention, PredictedNorm

ALL = sorted(CONFIGS)


@pytest.fixture(scope="module", params=ALL)
def family(request):
    return request.param


def method_for(family: str, **options) -> MoDeGPT:
    return MoDeGPT(**{"sparsity": 0.3, "rank_multiple": 2, "modules": named(family)} | options)


def compressed(family: str, **options):
    source = opened(family)
    return source, rankfold.compress(source, method=method_for(family, **options), calibration=tokens()).model


@pytest.fixture(scope="module")
def run(family):
    """Dense model and the compressed one, which no test may change."""
    return compressed(family)


@pytest.fixture(scope="module")
def moments(family):
    """Of the dense model, in memory."""
    return rankfold.calibrate(opened(family), tokens())


@torch.no_grad()
def logits(model, ids=None):
    return model(some_ids() if ids is None else ids).logits


def test_blocks_run_one_by_one_as_the_model_runs_them(family):
    source = opened(family)
    ids = some_ids(4)
    stream = start(source, ids, autocast=None)
    for index in range(len(source)):
        advance(source.block(index), stream)
    hidden = source.model(ids, output_hidden_states=True).hidden_states  # the last one is after the final norm
    before_last = start(source, ids, autocast=None)
    for index in range(len(source) - 1):
        advance(source.block(index), before_last)
    torch.testing.assert_close(torch.cat(before_last.hidden), hidden[-2], rtol=1e-4, atol=1e-5)


def test_sparsity_zero_leaves_the_logits_unchanged(family):
    source, model = compressed(family, sparsity=0.0)
    torch.testing.assert_close(logits(model), logits(source.model))


def test_replacing_attention_at_full_rank_leaves_the_logits_unchanged(family):
    """Forces the compressed attention module at full width: the runtime alone must be exact."""
    source = opened(family)
    view = source.block(0)
    attention, full = view.attention, view.attention.head_dim
    result = BlockResult()
    q, k, v = attention.qkv()
    put_attention(result, attention, {"q": q, "k": k, "v": v, "o": attention.output}, full, full, None)
    replace(view, result, source)
    assert any(isinstance(m, CompressedAttention) for m in view.module.modules())
    stream = start(source, some_ids(), autocast=None)
    reference = start(source, some_ids(), autocast=None)
    advance(view, stream)
    advance(source.block(0), reference)
    torch.testing.assert_close(stream.hidden[0], reference.hidden[0], rtol=1e-5, atol=1e-5)


def test_tensors_really_shrink_and_planned_equals_actual(run, family):
    source, model = run
    dense = sum(p.numel() for p in source.model.parameters())
    plan = rankfold.plan(source, method=method_for(family))
    assert sum(p.numel() for p in model.parameters()) == plan.parameters_after < dense
    assert plan.sparsity >= method_for(family).sparsity
    for parameter in model.parameters():
        if parameter.dim() == 2:
            assert (parameter.abs().sum(1) > 0).all(), "a row is all zeros: masked, not removed"


def test_saved_and_loaded_logits_are_identical(run, tmp_path):
    _, model = run
    rankfold.save(model, tmp_path / "small")
    again = rankfold.load(tmp_path / "small", device="cpu")
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "twice")
    assert torch.equal(logits(rankfold.load(tmp_path / "twice", device="cpu")), logits(model))


@pytest.mark.kinds
def test_folder_and_memory_give_the_same_model(run, family, tmp_path):
    source, model = run
    folder = rankfold.compress(source, method=method_for(family), calibration=tokens(), output=tmp_path / "out").output
    assert torch.equal(logits(rankfold.load(folder, device="cpu")), logits(model))


def test_generation_with_cache_equals_without(run):
    _, model = run
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = some_ids()
    cached = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=True, **options)
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **options)
    assert torch.equal(cached, plain)


def test_padding_on_the_left_changes_nothing(run, family):
    _, model = run
    if family in EXPERTS:
        pytest.skip("experts route pad tokens too; the dense model itself differs in the last digits")
    ids = some_ids(1, 12)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones_like(ids)], 1)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    batched = model.generate(padded, attention_mask=mask, **options)
    assert torch.equal(alone[:, 12:], batched[:, 17:])


def test_eager_and_sdpa_attention_agree(run, family):
    source, model = run
    if not type(source.model)._supports_sdpa:
        pytest.skip("the family itself runs eager attention only")
    if family == "falcon-alibi":
        pytest.skip("transformers' own eager Falcon adds ALiBi twice")
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    torch.testing.assert_close(logits(eager), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs(run, dtype):
    _, model = run
    reference = logits(model)
    low = copy.deepcopy(model).to(dtype)
    assert torch.isfinite(logits(low)).all()
    assert (logits(low).float() - reference).abs().max() < 0.15 * reference.abs().max()


@pytest.mark.kinds
def test_one_pass_from_saved_moments_equals_one_pass_at_once(family, moments, tmp_path):
    source = opened(family)
    method = method_for(family)
    rankfold.calibrate(source, tokens(), tmp_path / "moments")
    a = rankfold.compress(source, method=method, moments=rankfold.MomentStore.open(tmp_path / "moments")).model
    b = rankfold.compress(source, method=method, moments=moments).model
    c = rankfold.compress(source, method=method, calibration=tokens(), mode="one-pass").model
    assert torch.equal(logits(a), logits(b)) and torch.equal(logits(a), logits(c))


@pytest.mark.kinds
@pytest.mark.parametrize("allocation", ["influence", "influence-modules"])
def test_influence_allocations_meet_the_budget(family, moments, allocation):
    source = opened(family)
    method = method_for(family, allocation=allocation)
    plan = rankfold.plan(source, method=method, moments=moments)
    step = max(m.dense_weights // m.of * 2 for m in plan.modules)
    assert (
        method.sparsity * plan.counted_weights <= plan.removed_weights < method.sparsity * plan.counted_weights + step
    )
    assert all(m.relative_error is not None for m in plan.modules)


@pytest.mark.kinds
def test_same_seed_same_bits(run, family):
    assert torch.equal(logits(run[1]), logits(compressed(family)[1]))


def test_compiled_forward_agrees():
    _, model = compressed("llama")
    expected = logits(model)
    torch.testing.assert_close(logits(torch.compile(model, backend="eager", fullgraph=True)), expected)


@pytest.mark.parametrize("family", sorted(NORMED))
def test_predicted_norms_with_all_dimensions_leave_the_logits_unchanged(family):
    """Forces norms of the kind that predicts at full width: fitted to all dimensions they are the dense ones."""
    source = opened(family)
    for index in range(len(source)):
        view = source.block(index)
        attention, full = view.attention, view.attention.head_dim
        stream = start(source, some_ids(), autocast=None)
        moments = measure(source.block(index), stream, set(SQUARES), step=False)
        keep = [torch.arange(full).expand(n, -1) for n in (attention.heads, attention.kv_heads)]
        norms, result = predict_norms(attention, moments, keep), BlockResult()
        assert max(norms.errors) < 1e-6
        q, k, v = attention.qkv()
        projections = {"q": q, "k": k, "v": v, "o": attention.output}
        put_attention(result, attention, projections, full, full, norms=norms.tensors)
        replace(view, result, source)
        assert sum(isinstance(m, PredictedNorm) for m in view.module.modules()) == 2
        reference = start(source, some_ids(), autocast=None)
        advance(view, stream)
        advance(source.block(index), reference)
        torch.testing.assert_close(stream.hidden[0], reference.hidden[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "olmo2", "qwen3_moe"])
def test_normalised_queries_and_keys_are_taken_where_they_are_named_only(family):
    default, asked = (compressed(family, modules=modules)[1] for modules in (None, named(family)))
    widths = [{m.qk_dim for m in model.modules() if isinstance(m, CompressedAttention)} for model in (default, asked)]
    assert widths[0] == {8} and min(widths[1]) < 8


def test_norms_that_subtract_a_mean_keep_the_pair_dense_and_say_so():
    source = rankfold.open_model(t.AutoModelForCausalLM.from_config(t.PhiConfig(**SHAPE, qk_layernorm=True)))
    model = rankfold.compress(source, method=method_for("phi"), calibration=tokens()).model
    attention = next(m for m in model.modules() if isinstance(m, CompressedAttention))
    assert attention.qk_dim == 8 and attention.q_norm is not None
    with pytest.raises(UnsupportedModelError, match="cannot take module 'qk'.*norm"):
        rankfold.compress(source, method=method_for("phi", modules=("qk",)), calibration=tokens())


def test_the_cache_shrinks():
    source, model = compressed("llama", modules={"qk": 0.5, "vo": 0.5})
    with torch.no_grad():
        assert cached_numbers(model) == cached_numbers(source.model) // 2


def test_sliced_equals_zeroed():
    """Rotary pairs, kept scale, biases: dropping dimensions equals zeroing them in the dense model."""
    source = opened("qwen2")
    method = MoDeGPT(modules={"qk": 0.5}, rank_multiple=2)
    model = rankfold.compress(source, method=method, calibration=tokens(), mode="one-pass").model
    zeroed = tiny_model("qwen2")
    for index, block in enumerate(zeroed.model.layers):
        attention, small = block.self_attn, model.model.layers[index].self_attn
        head_dim, half = attention.head_dim, attention.head_dim // 2
        groups = attention.num_key_value_groups
        for k, pairs in enumerate(small.rotary_pairs.long()):
            dropped = torch.ones(head_dim, dtype=torch.bool)
            dropped[pairs], dropped[pairs + half] = False, False
            rows = dropped.nonzero()[:, 0]
            attention.k_proj.weight.data[rows + k * head_dim] = 0
            attention.k_proj.bias.data[rows + k * head_dim] = 0
            for g in range(groups):
                attention.q_proj.weight.data[rows + (k * groups + g) * head_dim] = 0
    torch.testing.assert_close(logits(model), logits(zeroed), rtol=1e-4, atol=1e-5)
