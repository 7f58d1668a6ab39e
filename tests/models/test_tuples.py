"""A config by which a model returns tuples."""

import pytest
import transformers as t

import rankfold
from families import some_ids, tiny_model, tokens
from rankfold import MoDeGPT
from rankfold.errors import UnsupportedModelError

METHOD = MoDeGPT(sparsity=0.3, rank_multiple=2)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_decoder_that_returns_tuples_is_refused(in_memory, tmp_path):
    model = tiny_model("llama")
    model.config.return_dict = False
    with pytest.raises(AttributeError):  # nor does transformers run it
        model(some_ids())
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"has return_dict false, .* set it to true"):
        rankfold.open_model(model if in_memory else tmp_path, device="cpu")


def test_an_encoder_that_returns_tuples_is_compressed():
    config = t.BertConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config.vocab_size, config.max_position_embeddings, config.return_dict = 96, 64, False
    found = rankfold.compress(t.BertModel(config).eval(), method=METHOD, calibration=tokens())
    assert isinstance(found.model(some_ids()), tuple)
