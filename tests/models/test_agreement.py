"""A model in memory that is not what its config describes: the result is built from the config."""

import copy

import pytest
import torch
import transformers as t
from torch import nn
from torch.nn.utils import prune

import rankfold
from families import some_ids, tiny_model, tokens
from rankfold import MoDeGPT
from rankfold.errors import UnsupportedModelError

METHOD = MoDeGPT(sparsity=0.3, rank_multiple=2)


def wider_embedding():
    model = tiny_model("llama")
    model.model.embed_tokens = nn.Embedding(101, 32)
    return model


def biased_head():
    model = tiny_model("llama")
    model.lm_head = nn.Linear(32, 96)
    return model


def cut():
    model = tiny_model("llama")
    model.model.layers = model.model.layers[:2]
    return model


def pruned():
    model = tiny_model("llama")
    prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.5)
    return model


def tied_by_hand():
    model = tiny_model("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def said_untied():
    model = tiny_model("llama-mha-tied")
    model.config.tie_word_embeddings = False
    return model


def untied_later():
    model = said_untied()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight * 2)
    return model


def said_tied():
    model = tiny_model("llama")
    model.config.tie_word_embeddings = True
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            wider_embedding,
            r"config describes: it has model\.embed_tokens\.weight \(101, 32\) instead of \(96, 32\); cor",
        ),
        (biased_head, r"config describes: it has besides lm_head\.bias; correct model\.config"),
        (cut, r"config describes: it lacks model\.layers\.2\.input_layernorm\.weight, .* and 4 more; correct"),
        (pruned, r"it lacks model\.layers\.0\.mlp\.up_proj\.weight; it has besides model\.layers\.0\.mlp\.up_proj\.w"),
        (tied_by_hand, r"lm_head\.weight and .* are one tensor, .* set config\.tie_word_embeddings=True"),
        (said_untied, r"lm_head\.weight and .* are one tensor, .* set config\.tie_word_embeddings=True"),
        (untied_later, r"lm_head\.weight became tied or untied after the model was made; save and load the model"),
        (said_tied, r"lm_head\.weight differs from .* set config\.tie_word_embeddings=False"),
    ],
)
def test_it_is_refused_before_anything_is_computed(make, message):
    with pytest.raises(UnsupportedModelError, match=message):
        rankfold.open_model(make(), device="cpu")


@pytest.mark.parametrize("make", [untied_later, said_tied])
def test_saving_and_loading_is_the_way_out(make, tmp_path):
    model = make()
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    loaded = t.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(some_ids()).logits, model(some_ids()).logits)
    assert len(rankfold.open_model(loaded, device="cpu"))


def test_layers_of_several_dtypes_are_read_as_the_first_ones_as_those_of_a_folder(tmp_path):
    """So a model is after training with norms or a head in fp32, or after `prepare_model_for_kbit_training` of peft."""
    model = tiny_model("llama").to(torch.bfloat16)
    even = copy.deepcopy(model)
    for name, weight in model.named_parameters():
        if "norm" in name or "layers.1" in name or "lm_head" in name:
            weight.data = weight.data.float()
    before = {name: weight.dtype for name, weight in model.named_parameters()}
    found, expected = (
        rankfold.compress(given, method=METHOD, calibration=tokens(), output=tmp_path / name)
        for name, given in (("uneven", model), ("even", even))
    )
    assert {name: weight.dtype for name, weight in model.named_parameters()} == before
    wanted = expected.model.state_dict()
    for name, tensor in found.model.state_dict().items():
        assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name
    with torch.no_grad():
        ids = some_ids()
        whole = rankfold.open_model(model, device="cpu").whole_model()
        assert torch.equal(whole(ids).logits, even(ids).logits)
