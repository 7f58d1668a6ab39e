"""Adapters and quantisers find the factors of latent layers, and what they make of them is what the model computes."""

import copy

import pytest
import torch
from torch import nn

import rankfold
from families import opened, some_ids, tokens
from rankfold.modules import LatentLinear

SETTINGS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def compressed(family: str, **options):
    options = {"sparsity": 0.5, "rank_multiple": 2} | options
    return rankfold.compress(
        opened(family), method=rankfold.LatentLLM(**options), calibration=tokens(), mode="one-pass"
    ).model


def factors(model) -> dict[str, nn.Module]:
    """Path -> factor of every latent layer."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LatentLinear)}
    return {f"{name}.{side}": getattr(layer, side) for name, layer in layers.items() for side in "AB"}


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(some_ids()).logits


def check_cache(model) -> None:
    """Latents are cached and expanded by the factor itself, so a factor that is not its ``weight`` shows here."""
    ids = some_ids(1, 8)
    with_cache, without = (model.generate(ids, use_cache=use, **SETTINGS) for use in (True, False))
    assert torch.equal(with_cache, without)


class Doubled(nn.Linear):
    """A layer that computes something else than its weight says, as adapters do."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "family, options", [("opt", {}), ("opt", {"shared_qkv": True, "sparsity": 0.7}), ("llama", {})]
)
def test_what_stands_in_for_a_factor_counts_with_the_cache_too(family, options):
    model = compressed(family, **options)
    before = logits(model)
    for layer in [m for m in model.modules() if isinstance(m, LatentLinear)]:
        layer.B.__class__ = Doubled
    assert (logits(model) - before).abs().max() > 0.1
    check_cache(model)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_lora_on_all_linear_layers_reaches_the_factors_trains_and_merges(family, tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft (pip install peft)")
    model = compressed(family)
    before, paths = logits(model), set(factors(model))
    tuned = peft.get_peft_model(
        model, peft.LoraConfig(target_modules="all-linear", r=2, lora_dropout=0.0, task_type="CAUSAL_LM")
    )
    reached = {name.removeprefix("base_model.model.") for name, m in tuned.named_modules() if hasattr(m, "lora_A")}
    assert paths and paths <= reached
    optimizer = torch.optim.Adam([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = tuned(some_ids(), labels=some_ids()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = logits(tuned)
    assert (after - before).abs().max() > 1e-3
    check_cache(tuned)
    merged = tuned.merge_and_unload()
    torch.testing.assert_close(logits(merged), after, rtol=1e-4, atol=1e-4)
    rankfold.save(merged, tmp_path / "merged")
    assert torch.equal(logits(rankfold.load(tmp_path / "merged", device="cpu")), logits(merged))


def test_adaption_prompts_train_where_the_attention_stays_dense():
    peft = pytest.importorskip("peft", reason="needs peft (pip install peft)")
    method = rankfold.Rankfold(sparsity=0.3, rank_multiple=2, modules=("mlp",))
    model = rankfold.compress(opened("llama"), method=method, calibration=tokens()).model
    prompts = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(model, prompts)
    tuned(some_ids(), labels=some_ids()).loss.backward()
    assert all(p.grad is not None for p in tuned.parameters() if p.requires_grad)
    check_cache(tuned)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_int8_weights_reach_every_factor(family):
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao (pip install torchao)")
    model = compressed(family)
    before, plain = logits(model), copy.deepcopy(model)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    kinds = {name: type(factor.weight) for name, factor in factors(model).items()}
    assert kinds and nn.Parameter not in kinds.values()
    change = (logits(model) - before).norm() / before.norm()
    assert 0 < change < 0.05
    check_cache(model)
    assert torch.equal(logits(plain), before)


def test_save_pretrained_is_a_method_of_the_model():
    """llm-compressor reads the function and the model off it."""
    model = compressed("opt")
    assert model.save_pretrained.__self__ is model and callable(model.save_pretrained.__func__)
    twin = copy.deepcopy(model)
    assert twin.save_pretrained.__self__ is twin
