"""Gemma: Llama's block, and lost without its start token. Gemma 2 and 3: norms before and after each half of a block,
sliding windows, soft caps, q/k-norm (3)."""

from dataclasses import replace

from .llama import LLAMA
from .spec import NormsSpec

BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")

GEMMA = replace(LLAMA, model_type="gemma", norms=NormsSpec(offset=1.0), needs_start=True)
GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    middle="pre_feedforward_layernorm",
    adds=False,
    norms_behind=BEHIND,
    norms=NormsSpec(mlp=("pre_feedforward_layernorm",), offset=1.0),
)
GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    attention=replace(LLAMA.attention, qk_norm=("q_norm", "k_norm"), norm_offset=1.0),
)

ARCHITECTURES = (GEMMA, GEMMA2, GEMMA3)
