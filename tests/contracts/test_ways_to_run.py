"""Ways of running that transformers has: what is computed is the same in all of them."""

import copy
import functools
import pickle

import pytest
import torch
import transformers

import rankfold
from families import filled_cache, opened, some_ids, tiny_model, tokens
from rankfold._utils.evaluating import cache_for
from rankfold.modules.kernels import eager_attention
from rankfold.modules.shortcuts import ShortcutBlock
from versions import before, needs

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
SHARED = {"shared_qkv": True, "joint": "none"}
HEADS = {"head_junction": True, "joint": "none", "sparsity": 0.2, "modules": ("q", "k")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a family, a method and options; written once."""

    @functools.cache
    def made(family: str, method: str, options: tuple = ()):
        place = tmp_path_factory.mktemp(family) / "small"
        made_by = rankfold.make_method(method, **{"sparsity": 0.3, "rank_multiple": 2} | dict(options))
        rankfold.compress(opened(family), method=made_by, calibration=tokens(), output=place, mode=made_by.modes[-1])
        return place

    return lambda family, method, **options: made(family, method, tuple(options.items()))


def loaded(place, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(place, **options).eval()


@torch.no_grad()
def logits(model):
    return model(some_ids()).logits


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"junction": "lu", "joint": "none"}])
def test_a_cached_step_with_sinks_is_what_all_tokens_at_once_give(folder, options):
    """What a sink takes is missing in the bias of values too."""
    model, ids = loaded(folder("gpt_oss", "latentllm", **options)), some_ids(2, 6)
    cache = filled_cache(model, ids[:, :5])
    torch.testing.assert_close(model(ids[:, 5:], **cache_for(model, cache)).logits, model(ids).logits[:, -1:])


OFFLOADED = [
    ("llama", {}),
    ("opt", {}),
    ("gpt_oss", {}),
    ("llama", {"junction": "lu", "joint": "none"}),
    ("opt", SHARED),
    ("opt", HEADS),
    ("opt", {"split_head": True, "junction": "left", "joint": "none"}),
    ("llama", {"bits": 4, "junction": "lu", "joint": "none"}),
]


@pytest.mark.parametrize("family, options", OFFLOADED)
def test_weights_on_disk_are_brought_back_wherever_they_are_used(folder, tmp_path, family, options):
    needs("accelerate", "1.15", "a model of which nothing fits in memory is refused")
    place = folder(family, "latentllm", **options)
    model = loaded(place)
    most = sum(p.nbytes for p in model.parameters()) // 2
    away = loaded(place, device_map="auto", max_memory={"cpu": most}, offload_folder=tmp_path)
    assert "disk" in away.hf_device_map.values()
    assert torch.equal(logits(away), logits(model))
    assert torch.equal(away.generate(some_ids(), **GREEDY), model.generate(some_ids(), **GREEDY))


@pytest.mark.parametrize("options", [{"bits": 4}, HEADS])
def test_buffers_on_disk_are_brought_back_too(folder, tmp_path, options):
    """Codes of quantised factors are buffers, and so is the order of a per-head identity."""
    needs("accelerate", "1.15", "a model of which nothing fits in memory is refused")
    place = folder("opt", "latentllm", **options)
    model = loaded(place)
    most = sum(p.nbytes for p in model.parameters()) // 2
    options = {"max_memory": {"cpu": most}, "offload_folder": tmp_path, "offload_buffers": True}
    away = loaded(place, device_map="auto", **options)
    assert "disk" in away.hf_device_map.values()
    assert torch.equal(away.generate(some_ids(), **GREEDY), model.generate(some_ids(), **GREEDY))


@pytest.mark.parametrize(
    "family, method",
    [("llama", "modegpt"), ("mistral", "rankfold"), ("gpt2", "modegpt"), ("opt", "latentllm"), ("llama", "slicegpt")],
)
def test_the_weights_of_every_attention_are_handed_out(folder, family, method):
    model = loaded(folder(family, method), attn_implementation="eager")
    with torch.no_grad():
        found = model(some_ids(), output_attentions=True).attentions
    assert len(found) == model.config.num_hidden_layers
    for weights in found:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


@pytest.mark.parametrize(
    "family, method",
    [("falcon-gqa", "modegpt"), ("falcon-alibi", "latentllm"), ("llama", "modegpt"), ("opt", "latentllm")],
)
def test_weights_come_where_those_of_the_dense_model_do(folder, family, method):
    """By default, which is sdpa: Falcon gives its weights there, and others none, with a cache or without."""
    models = [loaded(folder(family, method)), tiny_model(family)]
    options = GREEDY | {"return_dict_in_generate": True, "output_attentions": True}
    with torch.no_grad():
        found = [model(some_ids(), output_attentions=True).attentions for model in models]
        steps = [[w for step in model.generate(some_ids(), **options).attentions for w in step] for model in models]
    for ours, theirs in (found, steps):
        assert [w.shape for w in ours] == [w.shape for w in theirs]
        assert bool(ours) == family.startswith("falcon")
        assert all(torch.allclose(w.sum(-1), torch.ones(w.shape[:-1])) for w in ours)


@pytest.mark.parametrize("family, method", [("llama", "modegpt"), ("falcon-alibi", "modegpt"), ("opt", "latentllm")])
def test_a_graph_takes_any_number_of_rows_and_tokens(folder, family, method):
    model, free = loaded(folder(family, method)), torch.export.Dim.AUTO
    given = {"input_ids": some_ids(2, 10), "use_cache": False}
    sizes = {"input_ids": {0: free, 1: free}, "use_cache": None}
    with torch.no_grad():
        graph = torch.export.export(model, (), given, dynamic_shapes=sizes, strict=False).module()
        for ids in (some_ids(2, 10), some_ids(3, 17)):
            torch.testing.assert_close(graph(input_ids=ids, use_cache=False).logits, model(ids).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_the_states_of_every_block_are_handed_out_where_the_stream_is_narrower(folder, family):
    model, entered = loaded(folder(family, "slicegpt")), []
    for module in [module for module in model.modules() if isinstance(module, ShortcutBlock)]:
        module.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    with torch.no_grad():
        found = model(some_ids(), output_hidden_states=True)
        assert torch.equal(model.get_output_embeddings()(found.hidden_states[-1]), found.logits)
    assert len(found.hidden_states) == model.config.num_hidden_layers + 1 == len(entered) + 1
    assert all(torch.equal(state, before) for state, before in zip(found.hidden_states, entered, strict=False))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_saves_itself(folder, tmp_path, copied):
    other = copied(loaded(folder("llama", "modegpt")))
    other.model.norm.weight.data *= 2
    other.save_pretrained(tmp_path)
    assert torch.equal(logits(loaded(tmp_path)), logits(other))
    assert (tmp_path / "modeling_rankfold.py").exists()


@pytest.mark.parametrize(
    "family, method, options",
    [
        ("llama", "modegpt", {}),
        ("llama", "latentllm", {}),
        ("mistral", "latentllm", {}),
        ("opt", "latentllm", {}),
        ("opt", "latentllm", HEADS),
        ("llama", "latentllm", SHARED),
    ],
)
def test_a_static_cache_gives_the_same_tokens(folder, family, method, options):
    model = loaded(folder(family, method, **options))
    expected = model.generate(some_ids(), **GREEDY)
    static = {"cache_implementation": "static", "disable_compile": True}
    for more in (static, static | {"prefill_chunk_size": 7}):
        assert torch.equal(model.generate(some_ids(), **GREEDY, **more), expected), more


@torch.no_grad()
def test_latents_take_a_mask_that_is_no_tensor(folder):
    """Flex attention has one, and the attention function alone knows what it says; here one that hides nothing."""
    transformers.AttentionInterface.register(
        "open", lambda *args, **options: eager_attention(*args[:4], None, **options)
    )
    model, ids = loaded(folder("opt", "latentllm")), some_ids()
    attention, cache = model.model.decoder.layers[0].self_attn, filled_cache(model, ids)
    assert attention.latent_keys and attention.latent_values
    new = torch.randn(len(ids), 1, model.config.hidden_size)
    expected = attention(new, past_key_values=copy.deepcopy(cache), attention_mask=None)[0]
    model.set_attn_implementation("open")
    torch.testing.assert_close(attention(new, past_key_values=cache, attention_mask=object())[0], expected)


def batched(model):
    """Greedy tokens, and the error, of every prompt by continuous batching."""
    needs("transformers", "5.20", "pages of a continuous batch are set by other names")
    settings = transformers.GenerationConfig(**GREEDY | {"eos_token_id": -1})
    pages = transformers.ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64)
    found = model.generate_batch(
        some_ids().tolist(), generation_config=settings, continuous_batching_config=pages, warmup=False
    )
    return [(result.generated_tokens, result.error) for result in found.values()]


@pytest.mark.parametrize("family, method", [("llama", "modegpt"), ("opt", "latentllm"), ("llama", "slicegpt")])
def test_continuous_batching_gives_the_same_tokens(folder, family, method):
    if family == "opt":
        before("transformers", "5.24", "the dense model has no continuous batching either")
    model = loaded(folder(family, method))
    expected = model.generate(some_ids(), **GREEDY)[:, some_ids().shape[1] :]
    assert batched(model) == [(row, None) for row in expected.tolist()]


def test_continuous_batching_by_the_formula_gives_the_same_tokens(folder):
    model = loaded(folder("llama", "modegpt"))
    expected = model.generate(some_ids(), **GREEDY)[:, some_ids().shape[1] :]
    model.set_attn_implementation("eager")
    assert batched(model) == [(row, None) for row in expected.tolist()]


def test_continuous_batching_says_that_it_takes_no_fewer_heads(folder):
    found = batched(loaded(folder("llama", "flap")))
    assert len(found) == len(some_ids())
    for _, error in found:
        assert "pages for 2 heads of keys and values by the config, and this attention has 1" in error
