"""A compressed folder through transformers' other doors: without a head, and as a new model of its config."""

import pytest
import torch
import transformers

import rankfold
from families import CONFIGS, KINDS, opened, some_ids, tokens
from rankfold.errors import UnsupportedModelError
from rankfold.modules import CompressedAttention, RankfoldConfig
from rankfold.modules.sparse import SparseCorrection
from rankfold.modules.tensors import QuantizedTensor

LATENT = {"sparsity": 0.3, "rank_multiple": 2}
FACTORS = {
    "joint": {"joint": "qk,vo"},
    "sparse": {"sparse": 0.2},
    "sparse-alone": {"sparse": 1, "joint": "none"},
    "lu": {"junction": "lu", "joint": "none"},
    "bits": {"bits": 4, "joint": "none"},
    "head-identity": {"head_junction": True, "joint": "none", "modules": ("q", "k"), "sparsity": 0.2},
}


def compressed(family: str, folder, method: str = "modegpt", **options):
    options = options or {"sparsity": 0.3, "rank_multiple": 2}
    rankfold.compress(
        opened(family),
        method=rankfold.make_method(method, **options),
        calibration=tokens(),
        output=folder,
        mode="one-pass",
    )
    return folder


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return compressed(request.param, tmp_path_factory.mktemp(request.param) / "small")


def test_without_a_head(folder):
    model = rankfold.load(folder, device="cpu")
    body = transformers.AutoModel.from_pretrained(folder).eval()
    assert any(isinstance(module, CompressedAttention) for module in body.modules())
    with torch.no_grad():
        expected = model(some_ids(), output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(body(some_ids()).last_hidden_state, expected, rtol=1e-4, atol=1e-5)


def shapes(model) -> dict:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def check_built(folder, tmp_path):
    config = transformers.AutoConfig.from_pretrained(folder)
    built, model = transformers.AutoModelForCausalLM.from_config(config).eval(), rankfold.load(folder, device="cpu")
    assert shapes(built) == shapes(model)
    with torch.no_grad():
        logits = built(some_ids()).logits
    assert torch.isfinite(logits).all() and logits.std() > 0
    built.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(rankfold.load(tmp_path / "again", device="cpu")(some_ids()).logits, logits)
    return built


def test_from_config_builds_the_compressed_structure_and_not_a_dense_model(folder, tmp_path):
    check_built(folder, tmp_path)


@pytest.mark.parametrize("form", FACTORS)
def test_from_config_with_factors(form, tmp_path):
    """All that is in place of a matrix has random numbers too, and indices that are ones."""
    family = "opt" if form == "head-identity" else "llama"
    built = check_built(compressed(family, tmp_path / "small", "latentllm", **LATENT | FACTORS[form]), tmp_path)
    for module in built.modules():
        if isinstance(module, SparseCorrection):
            assert module(torch.ones(2, module.in_features)).count_nonzero(1).min() > 0
        if isinstance(module, QuantizedTensor):
            assert 0.015 < module.weight.std() < 0.025  # initializer_range


def test_from_config_with_the_same_rank_everywhere(tmp_path):
    check_built(compressed("llama", tmp_path / "small", "svd", sparsity=0.5, rank_multiple=2), tmp_path)


def test_a_dense_config_still_builds_a_dense_model():
    config = CONFIGS["llama"]()
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert not any(isinstance(module, CompressedAttention) for module in model.modules())
    assert not hasattr(model.config, "quantization_config")


def test_the_description_in_memory_builds_it_too(tmp_path):
    config = rankfold.load(compressed("llama", tmp_path / "small"), device="cpu").config
    assert isinstance(config.quantization_config, RankfoldConfig)
    assert any(isinstance(m, CompressedAttention) for m in transformers.LlamaForCausalLM._from_config(config).modules())


@pytest.mark.parametrize("auto", [transformers.AutoModel, transformers.AutoModelForCausalLM])
def test_the_first_blocks_alone(auto, tmp_path):
    """As of a dense folder; our own loader takes no part of a model."""
    small = compressed("llama", tmp_path / "small")
    whole, first = auto.from_pretrained(small).eval(), auto.from_pretrained(small, num_hidden_layers=2).eval()
    with torch.no_grad():
        expected = whole(some_ids(), output_hidden_states=True).hidden_states[2]
        found = first(some_ids(), output_hidden_states=True).hidden_states[-1]  # which the last norm has been through
    assert torch.equal(found, whole.base_model.norm(expected))
    first.save_pretrained(tmp_path / "first")
    assert shapes(auto.from_pretrained(tmp_path / "first")) == shapes(first)
    config = small / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'))
    with pytest.raises(rankfold.RankfoldError, match="model.layers.2"):
        rankfold.load(small, device="cpu")


def test_an_encoder_of_an_unknown_family_is_refused_for_what_it_is():
    """transformers does load it, as an encoder with a head."""
    config = transformers.DistilBertConfig(dim=32, hidden_dim=48, n_layers=1, n_heads=4, vocab_size=96)
    for cls in (transformers.DistilBertForMaskedLM, transformers.DistilBertModel):
        with pytest.raises(UnsupportedModelError, match="^model type 'distilbert' has no spec, and one is derived"):
            rankfold.open_model(cls(config), device="cpu")


def test_a_narrower_stream_ends_in_the_last_block_only(tmp_path):
    method = rankfold.make_method("slicegpt", sparsity=0.3, rank_multiple=2)
    rankfold.compress(opened("llama"), method=method, calibration=tokens(), output=tmp_path / "small")
    for auto in (transformers.AutoModel, transformers.AutoModelForCausalLM):
        with pytest.raises(ValueError, match=r"too few blocks for 'model\.layers\.2'.*without num_hidden_layers"):
            auto.from_pretrained(tmp_path / "small", num_hidden_layers=2)
