"""Ways of running that transformers has, for families that the other matrices of it leave out.

What the dense model can, a compressed one can, with the same results in all of them.
"""

import copy
import pickle

import pytest
import torch
import transformers

import rankfold
from families import filled_cache, opened, some_ids, tiny_model, tokens
from rankfold._utils.evaluating import cache_for
from versions import needs

FAMILIES = (
    "qwen2_moe",
    "olmo2",
    "glm4",
    "exaone4",
    "phi3",
    "cohere2",
    "gptj",
    "gpt_neo",
    "mpt",
    "smollm3",
    "granitemoe",
)
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


RUNS = [("modegpt", family) for family in FAMILIES]
RUNS += [("latentllm", family) for family in ("qwen2_moe", "gptj", "gpt_neo", "mpt", "smollm3")]
RUNS += [("slicegpt", family) for family in ("phi3", "gptj", "mpt")]
INTERFACE = set(FAMILIES) - {"gptj", "gpt_neo", "mpt"}  # whose attention in transformers goes through its interface


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def run(request, tmp_path_factory):
    """Family, and a compressed checkpoint of it with the dense model beside it."""
    name, family = request.param
    folder = tmp_path_factory.mktemp(family)
    tiny_model(family).save_pretrained(folder / "dense")
    method = rankfold.make_method(name, sparsity=0.2, rank_multiple=2)
    rankfold.compress(
        opened(family), method=method, calibration=tokens(), output=folder / "small", mode=method.modes[-1]
    )
    return family, folder


@pytest.fixture
def place(run):
    return run[1]


def loaded(place, name: str = "small", **options):
    return transformers.AutoModelForCausalLM.from_pretrained(place / name, **options).eval()


@torch.no_grad()
def logits(model, **given):
    return model(some_ids(), **given).logits


def generated(model, **options):
    return model.generate(some_ids(), attention_mask=torch.ones_like(some_ids()), **GREEDY | options)


def test_steps_with_a_cache_are_what_all_tokens_at_once_give(place):
    model, ids = loaded(place), some_ids()
    with torch.no_grad():
        expected, cache = model(ids, use_cache=False).logits, filled_cache(model, ids[:, :5])
        for at in range(5, 24):
            found = model(ids[:, at : at + 1], use_cache=True, **cache_for(model, cache))
            torch.testing.assert_close(found.logits[:, 0], expected[:, at], **CLOSE)


def test_padding_in_front_changes_nothing(place):
    ids = some_ids(1, 10)
    padded, mask = torch.cat([torch.zeros(1, 4).long(), ids], 1), torch.ones(1, 14).long()
    mask[:, :4] = 0
    model = loaded(place)
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[:, 10:]
    assert torch.equal(model.generate(padded, attention_mask=mask, **GREEDY)[:, 14:], plain)


def test_ways_of_attending_give_the_same(run):
    family, place = run
    expected = logits(loaded(place, attn_implementation="eager"))
    if family in INTERFACE:
        torch.testing.assert_close(logits(loaded(place, attn_implementation="sdpa")), expected, **CLOSE)
    model = loaded(place, attn_implementation="eager")
    with torch.no_grad():
        weights = model(some_ids(), output_attentions=True).attentions
    assert len(weights) == model.config.num_hidden_layers
    for one in weights:
        torch.testing.assert_close(one.sum(-1), torch.ones(one.shape[:-1]))


def test_beams_and_a_static_cache(run):
    family, place = run
    model, plain = loaded(place), generated(loaded(place))
    assert torch.equal(generated(model, num_beams=1), plain)
    assert generated(model, num_beams=3).shape == plain.shape
    static = {"cache_implementation": "static", "disable_compile": True}
    if family != "gpt_neo":  # whose dense model masks another window there
        assert torch.equal(generated(model, **static), plain)


def test_on_disk_in_bf16_copied_and_trained(place, tmp_path):
    model = loaded(place)
    expected = logits(model)
    most = sum(p.nbytes for p in model.parameters()) // 2
    options = {"device_map": "auto", "max_memory": {"cpu": most}}
    try:
        loaded(place, "dense", **options, offload_folder=tmp_path / "dense")
    except ValueError:
        pass  # no block is small enough
    else:
        away = loaded(place, **options, offload_folder=tmp_path / "small")
        assert torch.equal(logits(away), expected)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(copied), expected)
        copied.save_pretrained(tmp_path / "again")
        assert torch.equal(logits(loaded(tmp_path, "again")), expected)
    assert torch.isfinite(logits(loaded(place, dtype=torch.bfloat16))).all()
    model.train()
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model(some_ids(), labels=some_ids()).loss.backward()
    used = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not [name for name in used if "expert" not in name], used


def batched(model):
    needs("transformers", "5.20", "pages of a continuous batch are set by other names")
    settings = transformers.GenerationConfig(**GREEDY | {"eos_token_id": -1})
    pages = transformers.ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64)
    found = model.generate_batch(
        some_ids().tolist(), generation_config=settings, continuous_batching_config=pages, warmup=False
    )
    assert all(result.error is None for result in found.values()), [result.error for result in found.values()]
    return [result.generated_tokens for result in found.values()]


def test_continuous_batching_gives_the_same_tokens(run):
    family, place = run
    if family in INTERFACE:  # the others' dense models write something else there
        model = loaded(place)
        assert batched(model) == generated(model)[:, some_ids().shape[1] :].tolist()
