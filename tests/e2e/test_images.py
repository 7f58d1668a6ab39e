"""Models for images and text: their language model shrinks, the rest stays and keeps working."""

import pytest
import torch
import transformers as t

import rankfold
from families import GQA, tiny_model, tokens
from rankfold import MoDeGPT
from rankfold.errors import UnsupportedModelError

IMAGE = torch.tensor([[3, 90, 90, 90, 90, 5, 6]])  # four image tokens
PIXELS = torch.ones(1, 3, 28, 28)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "dense"
    tiny_model("gemma3-images").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"do_resize": true}')
    return folder


def test_the_language_model_shrinks_and_images_are_still_seen(dense, tmp_path):
    method = MoDeGPT(sparsity=0.3, rank_multiple=2)
    rankfold.compress(
        rankfold.open_model(dense, device="cpu"), method=method, calibration=tokens(), output=tmp_path / "small"
    )
    assert (tmp_path / "small" / "preprocessor_config.json").read_text() == '{"do_resize": true}'
    before, after = (t.AutoModelForImageTextToText.from_pretrained(f).eval() for f in (dense, tmp_path / "small"))
    assert after.model.language_model.layers[0].mlp.down_proj.weight.shape[1] < GQA["intermediate_size"]
    for (name, a), (other, b) in zip(
        before.model.vision_tower.state_dict().items(), after.model.vision_tower.state_dict().items(), strict=True
    ):
        assert name == other and torch.equal(a, b)
    with torch.no_grad():
        one, two = (after(input_ids=IMAGE, pixel_values=x * PIXELS).logits for x in (1, -1))
    assert torch.isfinite(one).all() and not torch.allclose(one[:, -1], two[:, -1])


def test_a_model_that_is_neither_a_language_model_nor_an_encoder_is_refused_in_one_line(tmp_path):
    model = t.T5EncoderModel(t.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=96))
    model.save_pretrained(tmp_path)
    for given in (tmp_path, model):
        with pytest.raises(
            UnsupportedModelError, match="model type 't5' as T5EncoderModel is not one that transformers"
        ):
            rankfold.open_model(given)
