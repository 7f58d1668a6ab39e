"""Mamba and attention: Bamba and Jamba have one or the other in a block, Falcon-H1 both beside each other. Nemotron-H:
Mamba, attention, an MLP or experts without gate, each in a block of its own and under one name."""

from dataclasses import replace

from .llama import LLAMA, MAMBA, STATE
from .spec import ExpertsSpec, MLPSpec, left_dense, mixer, no_attention

MLP = MLPSpec(gate="feed_forward.gate_proj", up="feed_forward.up_proj", down="feed_forward.down_proj")
BAMBA = replace(
    LLAMA, model_type="bamba", mixers=(MAMBA,), mlp=MLP, middle="pre_ff_layernorm", norms=None, returns_tuple=True
)
BESIDE = left_dense(LLAMA.attention, "Mamba stands beside it, and factors before and behind its layers")

NEMOTRON_SHARED = MLPSpec(
    up="mixer.shared_experts.up_proj",
    down="mixer.shared_experts.down_proj",
    width="moe_shared_expert_intermediate_size",
)

ARCHITECTURES = (
    BAMBA,
    replace(  # one field of its config is the width of MLPs and experts alike
        BAMBA,
        model_type="jamba",
        attention=replace(LLAMA.attention, position="none", width=None),
        mlp=replace(MLP, width=None),
        experts=ExpertsSpec(path="feed_forward.experts", width=None, count="num_experts"),
        returns_tuple=False,
    ),
    replace(BAMBA, model_type="falcon_h1", attention=BESIDE, mixers=(BESIDE,), is_plain_residual=False),
    replace(
        LLAMA,
        model_type="nemotron_h",
        attention=replace(LLAMA.attention, path="mixer", position="none"),
        mixers=(mixer("mixer", STATE), no_attention("mixer.down_proj"), no_attention(NEMOTRON_SHARED.down)),
        mlp=MLPSpec(up="mixer.up_proj", down="mixer.down_proj"),
        experts=ExpertsSpec(
            path="mixer.experts", shared=NEMOTRON_SHARED, count="n_routed_experts", groups=("n_group", "topk_group")
        ),
        middle=None,
        norms=None,
    ),
)
