"""Grouped queries and the multi-head model with repeated key and value heads are one function.

Compressed they stay so where the joint form loses nothing, and where all queries of a group want the same. Elsewhere
the multi-head model fits every head by itself, so it is better, and stores more.
"""

import pytest
import torch
import transformers as t

import rankfold
from families import ELIMINATION, GQA, ONE_SHOT, tiny_model, tokens
from rankfold import MoDeGPT

HEADS, KV_HEADS, WIDTH = 4, 2, 8
SELECTIONS = [pytest.param(ONE_SHOT, id="one-shot"), pytest.param(ELIMINATION, id="elimination")]


def llama(change=None):
    """Two query heads a key head, and its expansion; fp64."""
    grouped = tiny_model("llama").double()
    for block in grouped.model.layers:
        if change:
            change(block)
    state = grouped.state_dict()
    for name in [n for n in state if "k_proj" in n or "v_proj" in n]:
        heads = state[name].unflatten(0, (KV_HEADS, WIDTH))
        state[name] = heads.repeat_interleave(HEADS // KV_HEADS, 0).flatten(0, 1)
    expanded = t.LlamaForCausalLM(t.LlamaConfig(**{**GQA, "num_key_value_heads": HEADS})).double().eval()
    expanded.load_state_dict(state)
    return grouped, expanded


def falcon(change=None):
    """Four query heads on one key head, positions by ALiBi alone, and its expansion; fp64."""
    options = {"hidden_size": 32, "ffn_hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": HEADS}
    options |= {
        "vocab_size": 96,
        "alibi": True,
        "parallel_attn": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    torch.manual_seed(0)
    grouped, expanded = (
        t.FalconForCausalLM(t.FalconConfig(**options, multi_query=one)).double().eval() for one in (True, False)
    )
    for parameter in grouped.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    state = grouped.state_dict()
    for block in grouped.transformer.h:
        if change:
            change(block)
    for name in [n for n in state if "query_key_value" in n]:
        q, k, v = state[name].unflatten(0, (-1, WIDTH)).split([HEADS, 1, 1])
        state[name] = torch.stack([q, k.expand_as(q), v.expand_as(q)], 1).flatten(0, 2)
    expanded.load_state_dict(state)
    return grouped, expanded


def compressed(model, method):
    source = rankfold.open_model(model, device="cpu")
    source.autocast = None
    return rankfold.compress(source, method=method, calibration=tokens()).model


@torch.no_grad()
def assert_same(*models, tolerance: float = 1e-3) -> None:
    """Moments are products in fp32, and the two models round theirs differently."""
    first, *others = (model(tokens().ids).logits for model in models)
    for other in others:
        torch.testing.assert_close(other, first, rtol=tolerance, atol=tolerance)


def assert_changed(dense, small) -> None:
    with torch.no_grad():
        assert not torch.allclose(small(tokens().ids).logits, dense(tokens().ids).logits, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("make", [llama, falcon])
def test_the_mlp_is_compressed_the_same(make):
    grouped, expanded = make()
    method = MoDeGPT(modules={"mlp": 0.3}, rank_multiple=2)
    small = compressed(grouped, method)
    assert_same(small, compressed(expanded, method))
    assert_changed(grouped, small)


@torch.no_grad()
def with_silent_pairs(block) -> None:
    """Two rotary pairs of every key head carry nothing, others in each head."""
    keys = block.self_attn.k_proj.weight.view(KV_HEADS, 2, WIDTH // 2, -1)
    keys[0, :, [1, 3]] = 0
    keys[1, :, [0, 1]] = 0


@torch.no_grad()
def with_narrow_values(block) -> None:
    """Values, and keys of Falcon, of rank four."""
    if hasattr(block, "self_attn"):
        heads = block.self_attn.v_proj.weight.view(KV_HEADS, WIDTH, -1)
    else:
        heads = block.self_attention.query_key_value.weight.view(HEADS + 2, WIDTH, -1)[HEADS:]
    generator = torch.Generator().manual_seed(1)
    for head in heads:
        head[WIDTH // 2 :] = torch.randn(4, 4, generator=generator, dtype=head.dtype) @ head[: WIDTH // 2]


@pytest.mark.parametrize("select", SELECTIONS)
def test_pairs_that_carry_nothing_cost_nothing(select):
    grouped, expanded = llama(with_silent_pairs)
    method = MoDeGPT(modules={"qk": 0.5}, rank_multiple=2, **select)
    assert_same(grouped, compressed(grouped, method), compressed(expanded, method), tolerance=1e-6)


@pytest.mark.parametrize("gqa", ["joint", "paper"])
@pytest.mark.parametrize(
    "make, modules", [(llama, ("vo",)), (falcon, ("vo",)), (falcon, ("qk",)), (falcon, ("qk", "vo"))]
)
def test_heads_of_lower_rank_lose_nothing(make, modules, gqa):
    grouped, expanded = make(with_narrow_values)
    method = MoDeGPT(modules=dict.fromkeys(modules, 0.5), rank_multiple=2, gqa=gqa)
    assert_same(grouped, compressed(grouped, method), compressed(expanded, method))


@torch.no_grad()
def with_equal_queries(block) -> None:
    """All query heads of a group ask the same and send the same."""
    if hasattr(block, "self_attn"):
        queries, outputs, groups = block.self_attn.q_proj.weight, block.self_attn.o_proj.weight, KV_HEADS
    else:
        attention = block.self_attention
        queries, outputs, groups = attention.query_key_value.weight[: HEADS * WIDTH], attention.dense.weight, 1
    rows = queries.view(groups, HEADS // groups, WIDTH, -1)
    rows[:, 1:] = rows[:, :1]
    columns = outputs.view(len(outputs), groups, HEADS // groups, WIDTH)
    columns[:, :, 1:] = columns[:, :, :1]


@pytest.mark.parametrize("select", SELECTIONS)
@pytest.mark.parametrize("module", ["qk", "vo"])
@pytest.mark.parametrize("make", [llama, falcon])
def test_queries_that_want_the_same_get_what_each_alone_would(make, module, select):
    grouped, expanded = make(with_equal_queries)
    method = MoDeGPT(modules={module: 0.5}, rank_multiple=2, **select)
    small = compressed(grouped, method)
    assert_same(small, compressed(expanded, method))
    assert_changed(grouped, small)


def error_of(model, module: str, **options) -> float:
    """Squared error of a module of the first block at half its width, summed over query heads."""
    source = rankfold.open_model(model, device="cpu")
    source.autocast = None
    method = MoDeGPT(modules=(module,), rank_multiple=2, **options)
    moments = rankfold.calibrate(source, tokens())
    return method.decompose(source.block(0), dict(moments[0]), {module: WIDTH // 2}).reports[module]["error"]


@pytest.mark.parametrize("make", [llama, falcon])
def test_every_value_head_by_itself_is_better_than_jointly_and_jointly_better_than_the_paper(make):
    grouped, expanded = make()
    alone, joint = error_of(expanded, "vo"), error_of(grouped, "vo")
    assert alone < 0.99 * joint < 0.99**2 * error_of(grouped, "vo", gqa="paper")
    assert error_of(expanded, "vo", gqa="paper") == alone  # one query head a value head: the same form


def test_every_key_head_by_itself_is_better_than_jointly():
    grouped, expanded = falcon()
    assert error_of(expanded, "qk") < 0.99 * error_of(grouped, "qk")


def test_the_models_are_one_function():
    for make in (llama, falcon):
        assert_same(*make(), tolerance=1e-9)
        assert_same(*make(with_equal_queries), tolerance=1e-9)
