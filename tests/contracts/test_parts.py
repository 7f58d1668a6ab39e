"""Models of two parts: which is taken, what of it shrinks, and what stays."""

import copy

import pytest
import torch
import transformers as t
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

import rankfold
from families import GQA, HEADS_OF_STATES, IDS, VISION, some_ids, tokens
from rankfold import MoDeGPT
from rankfold.errors import OptionError, UnsupportedModelError
from tiny_encoders import tiny_encoder
from versions import needs, needs_merged_tables

METHOD = MoDeGPT(sparsity=0.3, rank_multiple=2)


def llava():
    """Llama after CLIP, whose last block but one is looked at."""
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
        assert rankfold.open_model(tiny_encoder("clip-vision"), device="cpu", component=part).part.name == part
    with pytest.raises(
        OptionError, match="CLIPModel has the components language and vision, got none; choose one with component$"
    ):
        rankfold.open_model(tiny_encoder("clip-vision"), device="cpu")
    for name, shown in {"vision": "vision", "": "''"}.items():
        with pytest.raises(OptionError, match=f"BertModel has the component language, got {shown}; name none"):
            rankfold.open_model(tiny_encoder("bert"), device="cpu", component=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("llava") / "dense"
    llava().save_pretrained(place)
    return place


@pytest.mark.parametrize("part", ["language", "vision"])
def test_llava_keeps_the_other_part_and_sees_images(part, folder, tmp_path):
    source = rankfold.open_model(folder, device="cpu", component=part)
    pixels = torch.randn(24, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    samples = (
        rankfold.CalibrationData(pixels[:16], "x", "x", 0, pixels[16:], patches=4) if part == "vision" else tokens()
    )
    rankfold.compress(source, method=METHOD, calibration=samples, output=tmp_path / "small")
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


def test_both_parts_one_after_the_other(folder, tmp_path):
    """Each with its own method and sparsity; streamed from a folder, and in memory."""
    pixels = torch.randn(24, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    images = rankfold.CalibrationData(pixels[:16], "x", "x", 0, pixels[16:], patches=4)
    first = rankfold.open_model(folder, device="cpu", component="vision")
    rankfold.compress(first, method=METHOD, calibration=images, output=tmp_path / "one")
    second = rankfold.open_model(tmp_path / "one", device="cpu", component="language")
    assert second.streamed
    latent = rankfold.LatentLLM(sparsity=0.2, rank_multiple=2)
    rankfold.compress(second, method=latent, calibration=tokens(), output=tmp_path / "both")
    in_memory = rankfold.compress(
        rankfold.open_model(rankfold.load(tmp_path / "one", device="cpu"), device="cpu"),
        method=latent,
        calibration=tokens(),
    ).model
    one, both = (t.AutoModelForImageTextToText.from_pretrained(tmp_path / f).eval() for f in ("one", "both"))
    towers = [m.model.vision_tower.state_dict() for m in (one, both)]
    assert towers[0].keys() == towers[1].keys() and all(torch.equal(x, towers[1][n]) for n, x in towers[0].items())
    assert "model.language_model.layers.0.self_attn" in both.config.quantization_config.modules
    assert both.config.quantization_config.fields["before"]["method"] == "modegpt"
    with torch.no_grad():
        seen = [m(input_ids=IMAGE, pixel_values=PIXELS).logits for m in (one, both, in_memory)]
    assert torch.equal(seen[1], seen[2]) and not torch.allclose(seen[0], seen[1])
    for part, place in (("vision", "one"), ("language", "both")):
        with pytest.raises(UnsupportedModelError, match=r"already compressed or quantised \(rankfold\)"):
            rankfold.open_model(tmp_path / place, device="cpu", component=part)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 7}
SMALL["intermediate_size"] = 16
PATCHES = {"depth": 1, "num_heads": 2, "patch_size": 7}
MERGED = PATCHES | {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32}
PLACES = {"image_token_id": 90, "vision_start_token_id": 91, "vision_end_token_id": 92, "video_token_id": 93}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
TEXT = {**GQA, **IDS, "max_position_embeddings": 128}
HALF_LINEAR = HEADS_OF_STATES | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
OF_LLAMA = {
    "text_config": TEXT | {"model_type": "llama"},
    "vision_config": SMALL,
    "image_token_id": 90,
    "scale_factor": 2,
    "pad_token_id": 0,
}
# Class, config, paths of the blocks of the language model and of the tower, where that has a spec.
SEEING = {
    "llava_next": (
        t.LlavaNextForConditionalGeneration,
        lambda: t.LlavaNextConfig(
            text_config=t.LlamaConfig(**GQA), vision_config=t.CLIPVisionConfig(**SMALL), image_token_id=90
        ),
        "model.language_model.layers",
        "model.vision_tower.encoder.layers",
    ),
    "idefics3": (
        t.Idefics3ForConditionalGeneration,
        lambda: t.Idefics3Config(**OF_LLAMA),
        "model.text_model.layers",
        "model.vision_model.encoder.layers",
    ),
    "smolvlm": (
        t.SmolVLMForConditionalGeneration,
        lambda: t.SmolVLMConfig(**OF_LLAMA),
        "model.text_model.layers",
        "model.vision_model.encoder.layers",
    ),
    "paligemma": (  # as PaliGemma 2, of which only the tower can use the kernel for attention
        t.PaliGemmaForConditionalGeneration,
        lambda: t.PaliGemmaConfig(
            text_config=TEXT | {"model_type": "gemma2", "head_dim": 8},
            vision_config=SMALL | {"model_type": "siglip_vision_model", "vision_use_head": False},
            image_token_index=90,
            projection_dim=32,
        ),
        "model.language_model.layers",
        "model.vision_tower.encoder.layers",
    ),
    "qwen2_vl": (
        t.Qwen2VLForConditionalGeneration,
        lambda: t.Qwen2VLConfig(
            text_config=TEXT | ROPE,
            vision_config=PATCHES | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 1},
            **PLACES,
        ),
        "model.language_model.layers",
        "model.visual.blocks",
    ),
    "qwen2_5_vl": (
        t.Qwen2_5_VLForConditionalGeneration,
        lambda: t.Qwen2_5_VLConfig(text_config=TEXT | ROPE, vision_config=MERGED, **PLACES),
        "model.language_model.layers",
        "model.visual.blocks",
    ),
    "qwen3_vl": (
        t.Qwen3VLForConditionalGeneration,
        lambda: t.Qwen3VLConfig(
            text_config=TEXT | ROPE | {"head_dim": 8},
            vision_config=MERGED | {"deepstack_visual_indexes": [0]},
            **PLACES,
        ),
        "model.language_model.layers",
        "model.visual.blocks",
    ),
    "qwen3_vl_moe": (
        t.Qwen3VLMoeForConditionalGeneration,
        lambda: t.Qwen3VLMoeConfig(
            text_config=TEXT
            | ROPE
            | {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 48},
            vision_config=MERGED | {"deepstack_visual_indexes": [0]},
            **PLACES,
        ),
        "model.language_model.layers",
        "model.visual.blocks",
    ),
    "mistral3": (
        t.Mistral3ForConditionalGeneration,
        lambda: t.Mistral3Config(
            text_config=TEXT | {"model_type": "mistral", "head_dim": 8},
            vision_config=SMALL | {"model_type": "pixtral", "head_dim": 8},
            image_token_index=90,
        ),
        "model.language_model.layers",
        None,
    ),
    "llama4": (  # its language model has a head of its own
        t.Llama4ForConditionalGeneration,
        lambda: t.Llama4Config(
            text_config=TEXT
            | {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2}
            | {"moe_layers": [0, 2], "no_rope_layers": [1, 0, 1]},
            vision_config=SMALL | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        ),
        "language_model.model.layers",
        None,
    ),
    "qwen3_5": (
        t.Qwen3_5ForConditionalGeneration,
        lambda: t.Qwen3_5Config(
            text_config=TEXT | copy.deepcopy(ROPE) | HALF_LINEAR | {"head_dim": 8}, vision_config=MERGED, **PLACES
        ),
        "model.language_model.layers",
        "model.visual.blocks",
    ),
}


@pytest.mark.parametrize("family", sorted(SEEING))
def test_parts_of_models_that_see(family, tmp_path, monkeypatch):
    if family == "llama4":  # the class of transformers 5.24 asks its language model for images, and fails on texts
        monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)
    if family in ("qwen2_vl", "qwen2_5_vl"):
        needs_merged_tables()
    cls, config, language, vision = SEEING[family]
    torch.manual_seed(0)
    model = cls(config()).eval()
    source = rankfold.open_model(model, device="cpu")
    source.autocast = None
    assert source.architecture.blocks == language
    ids = some_ids()
    with torch.no_grad():
        unchanged = rankfold.compress(source, method=MoDeGPT(sparsity=0.0), calibration=tokens()).model
        torch.testing.assert_close(unchanged(ids).logits, model(ids).logits)
        small = rankfold.compress(source, method=METHOD, calibration=tokens()).model
        rankfold.save(small, tmp_path / "small")
        again = t.AutoModelForImageTextToText.from_pretrained(tmp_path / "small").eval()
        assert type(again) is cls and torch.equal(again(ids).logits, small(ids).logits)
    if family == "paligemma":
        needs(
            "transformers", "5.21", "the dense model too continues a text in one way with a cache and another without"
        )
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(ids)
    cached, plain = (again.generate(ids, attention_mask=mask, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain)
    if vision:
        assert rankfold.open_model(model, device="cpu", component="vision").architecture.blocks == vision


def test_a_position_of_several_kinds_is_turned_as_in_the_dense_model():
    """Queries and keys of an image turn by its rows and columns; blocks get the table that the model makes of them."""
    needs_merged_tables()
    torch.manual_seed(0)
    cls, config, _, _ = SEEING["qwen2_5_vl"]
    model = cls(config()).eval()
    pixels, grid = torch.randn(16, 3 * 2 * 7 * 7), torch.tensor([[1, 4, 4]])
    ids = torch.tensor([[3, 91, 90, 90, 90, 90, 92, 5, 6]])  # 16 patches, four of which become a token
    seen = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid}
    seen["mm_token_type_ids"] = (ids == 90).long()
    source = rankfold.open_model(model, device="cpu")
    source.autocast = None
    keeping = rankfold.compress(
        source, method=MoDeGPT(modules={"vo": 0.3}, rank_multiple=2), calibration=tokens()
    ).model
    block, dense = keeping.model.language_model.layers[0], model.model.language_model.layers[0]
    found = {}

    def note(name):
        return lambda _, args, kwargs, out: found.update({name: (kwargs["position_embeddings"], out)})

    for name, module, network in (("small", block.self_attn, keeping), ("dense", dense.self_attn, model)):
        module.register_forward_hook(note(name), with_kwargs=True)
        with torch.no_grad():
            assert torch.isfinite(network(**seen).logits).all()
    assert torch.equal(found["small"][0][0], found["dense"][0][0])
    assert not torch.equal(found["dense"][0][0][0, 2], found["dense"][0][0][0, 0])


def test_a_model_for_images_without_a_spec_for_its_tower_has_its_language_part_only():
    model = t.LlavaForConditionalGeneration(
        t.LlavaConfig(
            text_config=t.LlamaConfig(**GQA),
            vision_config=t.PixtralVisionConfig(**VISION, num_hidden_layers=1, num_attention_heads=2),
            image_token_id=90,
        )
    )
    assert rankfold.open_model(model, device="cpu").part.name == "language"
    with pytest.raises(OptionError, match="has the component language, got vision"):
        rankfold.open_model(model, device="cpu", component="vision")


def test_a_tower_that_cannot_be_taken_leaves_the_language_part_alone():
    vision = t.Dinov2Config(
        **{**VISION, "patch_size": 7}, num_hidden_layers=1, num_attention_heads=2, use_swiglu_ffn=True
    )
    config = t.LlavaConfig(text_config=t.LlamaConfig(**GQA), vision_config=vision, image_token_id=90)
    model = t.LlavaForConditionalGeneration(config)
    assert rankfold.open_model(model, device="cpu").part.name == "language"
    with pytest.raises(
        UnsupportedModelError, match="this dinov2 has use_swiglu_ffn=True: its gated MLP has other names"
    ):
        rankfold.open_model(model, device="cpu", component="vision")


def test_a_decoding_bert_is_refused():
    config = t.BertConfig(**{k: v for k, v in GQA.items() if k != "num_key_value_heads"}, is_decoder=True)
    with pytest.raises(UnsupportedModelError, match="this bert has is_decoder=True: its blocks then attend to"):
        rankfold.open_model(t.BertModel(config), device="cpu")
