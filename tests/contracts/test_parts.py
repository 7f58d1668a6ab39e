"""Models of two parts: which is taken, what of it shrinks, and what stays."""

import pytest
import torch
import transformers as t

import rankfold
from encoders import opened_encoder, samples_of, tiny_encoder
from families import GQA, VISION, some_ids, tokens
from rankfold import MoDeGPT
from rankfold.errors import OptionError, UnsupportedModelError

METHOD = MoDeGPT(sparsity=0.3, multiple=2)


def llava():
    """Llama behind CLIP, whose last block but one is looked at."""
    torch.manual_seed(0)
    text = t.LlamaConfig(**GQA)
    vision = t.CLIPVisionConfig(**VISION, num_hidden_layers=3, num_attention_heads=2)
    config = t.LlavaConfig(text_config=text, vision_config=vision, image_token_id=90, image_seq_length=4)
    model = t.LlavaForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


IMAGE = torch.tensor([[3, 90, 90, 90, 90, 5, 6]])  # four image tokens
PIXELS = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))


def test_the_towers_of_clip_are_chosen_by_name():
    for part in ("language", "vision"):
        assert rankfold.open_model(tiny_encoder("clip-vision"), device="cpu", part=part).part.name == part
    with pytest.raises(
        OptionError, match="CLIPModel has the parts language and vision, got none; choose one with --part"
    ):
        rankfold.open_model(tiny_encoder("clip-vision"), device="cpu")
    with pytest.raises(OptionError, match="BertModel has the part language, got vision; choose one with --part"):
        rankfold.open_model(tiny_encoder("bert"), device="cpu", part="vision")


def test_the_card_says_which_part(tmp_path):
    source = opened_encoder("clip-text")
    rankfold.compress(source, METHOD, samples_of(source), tmp_path / "small")
    assert "--part language" in (tmp_path / "small" / "README.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("llava") / "dense"
    llava().save_pretrained(place)
    return place


@pytest.mark.parametrize("part", ["language", "vision"])
def test_llava_keeps_the_other_part_and_sees_images(part, folder, tmp_path):
    source = rankfold.open_model(folder, device="cpu", part=part)
    pixels = torch.randn(24, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    samples = rankfold.Images(pixels[:16], "x", "x", 0, pixels[16:], patches=4) if part == "vision" else tokens()
    rankfold.compress(source, METHOD, samples, tmp_path / "small")
    before, after = (t.AutoModelForImageTextToText.from_pretrained(f).eval() for f in (folder, tmp_path / "small"))
    blocks = {"language": "model.language_model.layers.", "vision": "model.vision_tower.encoder.layers."}[part]
    assert source.architecture.blocks == blocks.rstrip(".")
    small, same = after.state_dict(), 0
    for name, tensor in before.state_dict().items():
        if not name.startswith(blocks):
            assert torch.equal(small[name], tensor)
            same += 1
    assert same and sum(p.numel() for p in after.parameters()) < sum(p.numel() for p in before.parameters())
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for model in (before, after):
        assert model.generate(input_ids=IMAGE, pixel_values=PIXELS, **options).shape == (1, 11)
        assert model.generate(some_ids(2, 8), attention_mask=torch.ones(2, 8).long(), **options).shape == (2, 12)
    with torch.no_grad():
        one, two = (after(input_ids=IMAGE, pixel_values=sign * PIXELS).logits for sign in (1, -1))
    assert torch.isfinite(one).all() and not torch.allclose(one[:, -1], two[:, -1])


def test_nothing_changes_at_sparsity_zero(folder):
    source = rankfold.open_model(folder, device="cpu")
    model = rankfold.compress(source, MoDeGPT(sparsity=0.0), tokens())
    with torch.no_grad():
        got, expected = (m(input_ids=IMAGE, pixel_values=PIXELS).logits for m in (model, source.whole_model()))
    torch.testing.assert_close(got, expected)


def test_a_model_for_images_without_a_spec_for_its_tower_has_its_language_part_only():
    model = t.LlavaForConditionalGeneration(
        t.LlavaConfig(
            text_config=t.LlamaConfig(**GQA),
            vision_config=t.PixtralVisionConfig(**VISION, num_hidden_layers=1, num_attention_heads=2),
            image_token_id=90,
        )
    )
    assert rankfold.open_model(model, device="cpu").part.name == "language"
    with pytest.raises(OptionError, match="has the part language, got vision"):
        rankfold.open_model(model, device="cpu", part="vision")


def test_a_decoding_bert_is_refused():
    config = t.BertConfig(**{k: v for k, v in GQA.items() if k != "num_key_value_heads"}, is_decoder=True)
    with pytest.raises(UnsupportedModelError, match="this bert has is_decoder=True: its blocks then attend to"):
        rankfold.open_model(t.BertModel(config), device="cpu")
