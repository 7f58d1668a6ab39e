"""Command R and R7B: parallel block, rotary in adjacent pairs; Cohere 2 rotates in layers with a window."""

from dataclasses import replace

from .llama import LLAMA
from .spec import NormsSpec

COHERE = replace(
    LLAMA,
    model_type="cohere",
    attention=replace(LLAMA.attention, rope_style="gptj", interleaved_table=True),
    middle=None,
    norms=NormsSpec(mlp=("input_layernorm",), is_layernorm=True),
    unless=(("use_qk_norm", "its q/k-norms have weights of their own for every head"),),
)

ARCHITECTURES = (
    COHERE,
    replace(
        COHERE, model_type="cohere2", attention=replace(COHERE.attention, applies_rope="sliding_window"), unless=()
    ),
)
