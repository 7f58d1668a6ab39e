"""Tiny random models of every family; one line each. Offline, seconds."""

import torch
import transformers as t
from torch import nn

import rankfold
from rankfold import CalibrationData
from rankfold._utils.evaluating import cache_for
from rankfold.methods import method_class, method_names

# Methods that take models without experts.
ANY_MODEL = tuple(name for name in method_names() if not method_class(name).needs_experts)
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
GQA = {**SHAPE, "num_key_value_heads": 2}
HEADS_OF_STATES = {  # of linear attention
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
HEADS_OF_MAMBA = {
    "mamba_chunk_size": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
GROWING = {  # queries, from position 8 on
    **{"rope_type": "default", "rope_theta": 1e4},
    **{"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8},
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# MoDeGPT's selections: the default, and the paper's.
ELIMINATION = {"selection": "obs", "selection_qk": "obs"}
ONE_SHOT = {"selection": "leverage", "selection_qk": "norm"}

CONFIGS = {
    "llama": lambda: t.LlamaConfig(**GQA),
    "llama-mha-tied": lambda: t.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-bias": lambda: t.LlamaConfig(**GQA, attention_bias=True, mlp_bias=True),
    "mistral": lambda: t.MistralConfig(**GQA, sliding_window=8, head_dim=8),
    "ministral3": lambda: t.Ministral3Config(**GQA, head_dim=8, rope_parameters=GROWING),
    "qwen2": lambda: t.Qwen2Config(**GQA),
    "qwen3": lambda: t.Qwen3Config(**GQA, head_dim=8),
    "gemma": lambda: t.GemmaConfig(**{**GQA, "num_key_value_heads": 1}, head_dim=16, **IDS),
    "gemma2": lambda: t.Gemma2Config(**GQA, head_dim=8, sliding_window=8, **IDS),
    "gemma3": lambda: t.Gemma3TextConfig(**{**GQA, "num_key_value_heads": 1}, head_dim=8, sliding_window=8, **IDS),
    "gemma3-images": lambda: t.Gemma3Config(
        text_config={**GQA, "head_dim": 8, "sliding_window": 8, **IDS},
        vision_config={**VISION, "num_hidden_layers": 1, "num_attention_heads": 2},
        image_token_index=90,
        mm_tokens_per_image=4,
    ),
    "gptj": lambda: t.GPTJConfig(
        n_embd=32, n_layer=3, n_head=4, n_inner=48, rotary_dim=4, vocab_size=96, n_positions=64
    ),
    "gpt_neo": lambda: t.GPTNeoConfig(
        **_neo(), attention_types=[[["local", "global"], 1], [["local"], 1]], window_size=8, intermediate_size=48
    ),
    "mpt": lambda: t.MptConfig(d_model=32, n_heads=4, n_layers=3, vocab_size=96, max_seq_len=64),
    "phi": lambda: t.PhiConfig(**SHAPE, partial_rotary_factor=0.5),
    "phi3": lambda: t.Phi3Config(**GQA, **IDS),
    "opt": lambda: t.OPTConfig(**_opt(), word_embed_proj_dim=32),
    "opt-post-norm": lambda: t.OPTConfig(**_opt(), word_embed_proj_dim=16, do_layer_norm_before=False),  # as OPT-350m
    "gpt2": lambda: t.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_inner=48, vocab_size=96, n_positions=64),
    "gpt_neox": lambda: t.GPTNeoXConfig(**SHAPE, rotary_pct=0.5),
    "gpt_neox-sequential": lambda: t.GPTNeoXConfig(**SHAPE, use_parallel_residual=False),
    "falcon-mqa": lambda: t.FalconConfig(**_falcon(), multi_query=True),
    "falcon-gqa": lambda: t.FalconConfig(**_falcon(), new_decoder_architecture=True, num_kv_heads=2),
    "falcon-gqa-one-norm": lambda: t.FalconConfig(  # as Falcon 2 11B
        **_falcon(), new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "falcon-sequential": lambda: t.FalconConfig(**_falcon(), multi_query=True, parallel_attn=False),
    "falcon-alibi": lambda: t.FalconConfig(**_falcon(), alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "bloom": lambda: t.BloomConfig(hidden_size=32, n_layer=3, n_head=4, vocab_size=96),
    "mixtral": lambda: t.MixtralConfig(**GQA, num_local_experts=2),
    "seed_oss": lambda: t.SeedOssConfig(**GQA, head_dim=8, attention_bias=True),
    "smollm3": lambda: t.SmolLM3Config(**GQA, no_rope_layers=[1, 0, 1], **IDS),  # the second layer does not rotate
    "ernie4_5": lambda: t.Ernie4_5Config(**GQA, head_dim=8, use_bias=True),
    "helium": lambda: t.HeliumConfig(**GQA, head_dim=8),
    "granite": lambda: t.GraniteConfig(
        **GQA, residual_multiplier=0.5, attention_multiplier=0.3, embedding_multiplier=2.0, logits_scaling=1.5
    ),
    "granitemoe": lambda: t.GraniteMoeConfig(
        **{**GQA, "intermediate_size": 16}, num_local_experts=2, num_experts_per_tok=2, attention_multiplier=0.3
    ),
    "olmo": lambda: t.OlmoConfig(**GQA),
    "olmo2": lambda: t.Olmo2Config(**GQA),
    "olmo3": lambda: t.Olmo3Config(**GQA, sliding_window=8),
    "olmoe": lambda: t.OlmoeConfig(**{**GQA, "intermediate_size": 16}, num_experts=2, num_experts_per_tok=2),
    "cohere": lambda: t.CohereConfig(**GQA, **IDS),
    "cohere2": lambda: t.Cohere2Config(  # the last layer does not rotate
        **GQA, head_dim=8, sliding_window=8, layer_types=["sliding_attention"] * 2 + ["full_attention"], **IDS
    ),
    "glm": lambda: t.GlmConfig(**GQA, head_dim=8, **IDS),
    "glm4": lambda: t.Glm4Config(**GQA, head_dim=8, **IDS),
    "exaone4": lambda: t.Exaone4Config(
        **GQA, head_dim=8, sliding_window=8, layer_types=["sliding_attention"] * 2 + ["full_attention"], **IDS
    ),
    "stablelm": lambda: t.StableLmConfig(**GQA, partial_rotary_factor=0.5, use_qkv_bias=True),
    "stablelm-parallel": lambda: t.StableLmConfig(**GQA, partial_rotary_factor=0.5, use_parallel_residual=True),
    "arcee": lambda: t.ArceeConfig(**GQA, mlp_bias=True),
    "nemotron": lambda: t.NemotronConfig(**GQA, head_dim=8, partial_rotary_factor=0.5),
    "apertus": lambda: t.ApertusConfig(**GQA),
    "starcoder2": lambda: t.Starcoder2Config(**GQA, sliding_window=8),
    "qwen2_moe": lambda: t.Qwen2MoeConfig(
        **GQA, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "gpt_oss": lambda: t.GptOssConfig(
        **{**GQA, "intermediate_size": 16},
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=2,
        sliding_window=8,
        **IDS,
    ),
    "qwen3_moe": lambda: t.Qwen3MoeConfig(
        **GQA, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    ),
}

# Families whose specs say nothing that those of others do not: they run the contracts of one method only.
ALIKE = {
    *("seed_oss", "ernie4_5", "helium", "granite", "granitemoe", "olmo", "olmo3", "olmoe", "glm4", "stablelm"),
    *("stablelm-parallel", "arcee", "nemotron", "apertus", "starcoder2", "qwen2_moe", "gptj", "gpt_neo", "mpt"),
}
KINDS = [family for family in sorted(CONFIGS) if family not in ALIKE]
EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "olmoe", "gpt_oss"}  # in place of MLPs
# Their queries and keys are normalised.
NORMED = {"qwen3", "qwen3_moe", "gemma3", "gemma3-images", "olmo2", "olmo3", "olmoe", "exaone4", "apertus"}


def named(family: str) -> tuple[str, ...] | None:
    """Modules to ask for, so that all are taken that can be; normalised queries and keys are not by themselves."""
    if family not in NORMED:
        return None
    return ("experts", "qk", "vo") if family in EXPERTS else ("mlp", "qk", "vo")


def _opt() -> dict:
    return {**{k: v for k, v in SHAPE.items() if k != "intermediate_size"}, "ffn_dim": 48, "dropout": 0.0}


def _neo() -> dict:
    return {"hidden_size": 32, "num_layers": 3, "num_heads": 4, "vocab_size": 96, "max_position_embeddings": 64}


def _falcon() -> dict:
    return {
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 96,
        "max_position_embeddings": 64,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def tiny_model(family: str, seed: int = 0, blocks: int | None = None) -> nn.Module:
    """A random model; weights and biases large enough that every path matters. ``blocks``: how many, if not its own."""
    torch.manual_seed(seed)
    config = CONFIGS[family]()
    if blocks is not None:
        text = config.get_text_config()
        text.num_hidden_layers = blocks
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:blocks]
    model = t.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.15)
        elif "q_norm" in name or "k_norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith(("bias", "sinks")):
            nn.init.normal_(parameter, std=0.1)
    model.tie_weights()
    return model.eval()


def cached_numbers(model) -> int:
    """Numbers that the cache of a model holds for a token."""
    with torch.no_grad():
        layers = filled_cache(model, some_ids()).layers
    # A state of one size is not counted, as of linear attention.
    layers = [layer for layer in layers if getattr(layer, "keys", None) is not None]
    found = sum(layer.keys[0, :, 0].numel() + layer.values[0, :, 0].numel() for layer in layers)
    indexed = [keys for layer in layers if (keys := getattr(layer, "indexer_keys", None)) is not None]
    return found + sum(keys.shape[-1] for keys in indexed)


def filled_cache(model, ids: torch.Tensor) -> t.DynamicCache:
    """A cache with the keys and values of some tokens."""
    cache = t.DynamicCache(config=model.config)
    model(ids, use_cache=True, **cache_for(model, cache))
    return cache


def some_ids(rows: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


def opened(family: str, blocks: int | None = None):
    """A tiny model, open, its blocks run in fp32."""
    source = rankfold.open_model(tiny_model(family, blocks=blocks), device="cpu")
    source.autocast = None
    return source


def tokens(rows: int = 16) -> CalibrationData:
    return CalibrationData(some_ids(rows, 32, seed=1), "random", "random", 0, held_out=some_ids(2, 32, seed=2))
