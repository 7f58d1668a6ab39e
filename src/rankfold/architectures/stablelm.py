"""StableLM: Llama's block with partial rotary embedding, parallel by config."""

from dataclasses import replace

from .llama import LLAMA
from .spec import ByConfig, NormsSpec

ARCHITECTURES = (
    replace(
        LLAMA,
        model_type="stablelm",
        attention=replace(LLAMA.attention, width=None),
        middle=ByConfig("use_parallel_residual", yes=None, no="post_attention_layernorm"),
        norms=NormsSpec(mlp=("post_attention_layernorm", "input_layernorm"), centres=True),
        unless=(("qk_layernorm", "its q/k-norms have weights of their own for every head"),),
    ),
)
