"""StableLM: Llama's block with partial rotary embedding, parallel by config."""

from dataclasses import replace

from .llama import LLAMA
from .spec import ByConfig

ARCHITECTURES = (
    replace(
        LLAMA,
        model_type="stablelm",
        attention=replace(LLAMA.attention, width=None),
        middle=ByConfig("use_parallel_residual", yes=None, no="post_attention_layernorm"),
        unless=(("qk_layernorm", "its q/k-norms have weights of their own for every head"),),
    ),
)
