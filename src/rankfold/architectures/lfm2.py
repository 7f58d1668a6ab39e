"""LFM2: attention with q/k-norms in some blocks, a short convolution in the others, and experts in the larger ones."""

from dataclasses import replace

from .llama import LLAMA
from .spec import ExpertsSpec, MLPSpec, mixer

LFM2 = replace(
    LLAMA,
    model_type="lfm2",
    attention=replace(LLAMA.attention, output="out_proj", qk_norm=("q_layernorm", "k_layernorm"), width=None),
    mixers=(mixer("conv", "it is a convolution"),),
    mlp=MLPSpec(gate="feed_forward.w1", up="feed_forward.w3", down="feed_forward.w2", width=None),
    middle="ffn_norm",
    norms=None,
)

ARCHITECTURES = (
    LFM2,
    replace(LFM2, model_type="lfm2_moe", experts=ExpertsSpec(path="feed_forward.experts", count="num_experts")),
)
