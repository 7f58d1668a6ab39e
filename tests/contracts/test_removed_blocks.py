"""Blocks that go out of the middle of every model: what is left computes what the dense model does without them."""

import json

import pytest
import torch
import transformers as t
from torch import nn

import rankfold
import tiny_pairs
from activations import blocks_of
from families import CONFIGS, GQA, IDS, some_ids, tokens
from rankfold import make_method
from rankfold.allocation import block_weights
from rankfold.architectures import registry
from rankfold.errors import OptionError, UnsupportedModelError
from tiny_encoders import ENCODERS, batch_of, samples_of, states

EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {"use_sliding_window": True, "sliding_window": 8}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
# How configs say that blocks differ: as a pattern, a count or numbers.
PATTERNS = {
    "qwen2-windows": lambda n: t.Qwen2Config(**GQA | n, **SLIDING, max_window_layers=2),
    "qwen3-windows": lambda n: t.Qwen3Config(**GQA | n, **SLIDING, max_window_layers=2, head_dim=8),
    "qwen2_moe-sparse": lambda n: t.Qwen2MoeConfig(
        **GQA | n, **EXPERTS, **SLIDING, shared_expert_intermediate_size=16, decoder_sparse_step=2, max_window_layers=4
    ),
    "qwen3_moe-some": lambda n: t.Qwen3MoeConfig(**GQA | n, **EXPERTS, mlp_only_layers=[0, 2, 3], head_dim=8),
    "deepseek_v3": lambda n: t.DeepseekV3Config(
        **GQA | n | {"num_key_value_heads": 4},
        **LATENT,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=2,
    ),
    "gemma3-pattern": lambda n: t.Gemma3TextConfig(
        **GQA | n, head_dim=8, sliding_window=8, sliding_window_pattern=2, **IDS
    ),
    "cohere2-pattern": lambda n: t.Cohere2Config(
        **GQA | n, head_dim=8, sliding_window=8, sliding_window_pattern=2, **IDS
    ),
    "cohere2_moe-pattern": lambda n: t.Cohere2MoeConfig(  # whose config takes no None for the pattern
        **GQA | n, **EXPERTS, head_dim=8, sliding_window=8, sliding_window_pattern=2, **IDS
    ),
    "exaone4-pattern": lambda n: t.Exaone4Config(
        **GQA | n, head_dim=8, sliding_window=8, sliding_window_pattern=3, **IDS
    ),
    "recurrent_gemma-pattern": lambda n: t.RecurrentGemmaConfig(  # layers_block_type follows from it
        **GQA | n, lru_width=32, attention_window_size=40, block_types=["attention", "attention", "recurrent"], **IDS
    ),
    "smollm3-interval": lambda n: t.SmolLM3Config(**GQA | n, **SLIDING, no_rope_layer_interval=2, **IDS),
}
BLOCKS, GONE = 5, (1, 3)
NUMBERED = {  # of encoders and towers
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "fullatt_block_indexes": [1, 2],
    "deepstack_visual_indexes": [0, 2],
}


def deep(family: str):
    """A config of five blocks that differ as those of the family do."""
    if family in PATTERNS:
        return PATTERNS[family]({"num_hidden_layers": BLOCKS})
    config = CONFIGS[family]()
    given = config.to_dict()
    text = given.get("text_config", given)
    text[config.get_text_config().attribute_map.get("num_hidden_layers", "num_hidden_layers")] = BLOCKS
    for name in ("layer_types", "no_rope_layers"):
        if text.get(name):
            text[name] = (text[name] * 2)[:BLOCKS]
    if text.pop("attention_layers", None):
        text["attention_types"] = [[["local", "global"], 2], [["local"], 1]]
    return type(config).from_dict(given)


def deep_encoder(family: str):
    """Likewise of an encoder, or of what owns a tower."""
    config = ENCODERS[family].config
    given = config.to_dict()
    for part in (given, given.get("text_config") or {}, given.get("vision_config") or {}):
        part |= {name: BLOCKS for name in ("num_hidden_layers", "depth") if name in part}
        part |= {name: value for name, value in NUMBERED.items() if part.get(name)}
        for name in ("stage_names", "out_features", "out_indices"):
            part.pop(name, None)
    return type(config).from_dict(given)


def filled(make) -> nn.Module:
    """A model whose weights are large enough that every path matters."""
    torch.manual_seed(0)
    model = make()
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.15)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    model.tie_weights()
    return model.eval()


def made(family: str) -> nn.Module:
    return filled(lambda: t.AutoModelForCausalLM.from_config(deep(family)))


def made_encoder(family: str) -> nn.Module:
    return filled(lambda: getattr(t, ENCODERS[family].name)(deep_encoder(family)))


def without(blocks: nn.ModuleList, gone) -> None:
    """Have these blocks hand on what they receive."""

    def hand_on(_, args, kwargs, output):
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    for index in gone:
        blocks[index].register_forward_hook(hand_on, with_kwargs=True)


def removal(source, gone=GONE):
    """The method that removes these blocks and protects all others."""
    sizes = [block_weights(block) for block in source.blocks]
    sparsity = sum(sizes[block] for block in gone) / sum(sizes) - 1e-6
    return make_method("shortgpt", sparsity=sparsity, exclude_blocks=tuple(set(range(len(sizes))) - set(gone)))


@pytest.mark.parametrize("family", [*CONFIGS, *PATTERNS])
def test_what_is_left_computes_what_the_dense_model_does_without_the_blocks(family, tmp_path):
    model, ids = made(family), some_ids()
    source = rankfold.open_model(model, device="cpu")
    folder = rankfold.compress(source, method=removal(source), calibration=tokens(), output=tmp_path / "small").output
    stock = t.AutoModelForCausalLM.from_pretrained(folder)
    dense = made(family)
    without(blocks_of(dense), GONE)
    with torch.no_grad():
        expected = dense(ids, use_cache=False).logits
        torch.testing.assert_close(stock(ids, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(stock(ids).logits, expected, rtol=1e-5, atol=1e-5)
    written = json.loads((folder / "config.json").read_text())
    text, before = written.get("text_config", written), model.config.get_text_config().to_dict()
    for name, value in before.items():
        if isinstance(value, list) and len(value) == BLOCKS and name != "mlp_only_layers":
            assert text[name] == [value[block] for block in range(BLOCKS) if block not in GONE], name


@pytest.mark.parametrize("family", ENCODERS)
def test_what_is_left_of_an_encoder_computes_what_the_dense_one_does_without_the_blocks(family, tmp_path):
    part = ENCODERS[family].part
    source = rankfold.open_model(made_encoder(family), device="cpu", component=part)
    folder = rankfold.compress(
        source, method=removal(source), calibration=samples_of(source), output=tmp_path / "small"
    ).output
    dense = rankfold.open_model(made_encoder(family), device="cpu", component=part)
    without(dense.blocks, GONE)
    small, batch = rankfold.load(folder, device="cpu"), batch_of(source)
    torch.testing.assert_close(states(small, family, batch), states(dense.model, family, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("named, gone", [(-2, (1, 3)), (-2, (1, 4)), (2, (0, 3)), ([-4, -1, 3], (0, 2))])
def test_a_language_model_receives_the_same_states_of_its_tower(named, gone, tmp_path):
    """LLaVA names the states it takes by their place among the tower's blocks."""

    def make() -> nn.Module:
        config = tiny_pairs.FAMILIES["llava"].config()
        config.vision_config.num_hidden_layers, config.vision_feature_layer = BLOCKS, named
        return filled(lambda: t.LlavaForConditionalGeneration(config))

    source = rankfold.open_model(make(), device="cpu", component="vision")
    pixels = torch.randn(4, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    images = rankfold.CalibrationData(pixels, "random", "random", 0, pixels[:1], patches=4)
    small = rankfold.load(
        rankfold.compress(source, method=removal(source, gone), calibration=images, output=tmp_path / "small").output,
        device="cpu",
    )
    dense = rankfold.open_model(make(), device="cpu", component="vision")
    without(dense.blocks, gone)
    with torch.no_grad():
        found, expected = (m.get_image_features(pixels).pooler_output for m in (small, dense.model))
    torch.testing.assert_close(torch.cat(list(found)), torch.cat(list(expected)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method, derived", [("shortgpt", False), ("sleb", False), ("shortgpt", True)])
def test_blocks_that_images_are_added_after_stay(method, derived, monkeypatch):
    """By their number: images would be added after others."""
    if derived:  # as of Qwen3-VL-MoE
        monkeypatch.delitem(registry._BY_TYPE, "qwen3_vl_text")
    config = tiny_pairs.FAMILIES["qwen3_vl"].config()
    config.text_config.num_hidden_layers = BLOCKS
    config.vision_config.depth, config.vision_config.deepstack_visual_indexes = 2, [0, 1]
    source = rankfold.open_model(filled(lambda: t.Qwen3VLForConditionalGeneration(config)), device="cpu")
    plan = rankfold.plan(
        source, method=make_method(method, sparsity=0.6), calibration=tokens(), moments=moments_for(method, source)
    )
    assert [m.block for m in plan.modules if m.rank == 0] == [2, 3, 4]
    with pytest.raises(OptionError, match="can lose at most"):
        rankfold.plan(
            source, method=make_method(method, sparsity=0.7), calibration=tokens(), moments=moments_for(method, source)
        )


def moments_for(method: str, source):
    return None if method == "sleb" else rankfold.calibrate(source, tokens())


def test_the_first_block_of_modernbert_stays():
    """It has no norm in front, and one that took its place would lose its own."""
    source = rankfold.open_model(made_encoder("modernbert-head"), device="cpu")
    method = make_method("shortgpt", sparsity=0.8)
    plan = rankfold.plan(source, method=method, moments=rankfold.calibrate(source, samples_of(source)))
    assert [m.block for m in plan.modules if m.rank == 1] == [0]


def test_blocks_that_depend_on_their_number_are_refused_before_the_run(tmp_path):
    config = t.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=96, scale_attn_by_inverse_layer_idx=True)
    source = rankfold.open_model(t.GPT2LMHeadModel(config), device="cpu")
    seen = []
    with pytest.raises(
        UnsupportedModelError,
        match="block 1 of this gpt2 depends on its number: without block 0 it has another attn.scaling, "
        "which its config",
    ):
        rankfold.compress(
            source, method=make_method("shortgpt"), calibration=tokens(), output=tmp_path / "out", on_plan=seen.append
        )
    assert not seen and not list(tmp_path.iterdir())
