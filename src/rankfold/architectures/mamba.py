"""Mamba and attention: Bamba and Jamba have one or the other in a block, Falcon-H1 both beside each other. Nemotron-H:
Mamba, attention or an MLP, each in a block of its own and under one name."""

from dataclasses import replace

from .llama import LLAMA, MAMBA, STATE
from .spec import ExpertsSpec, MLPSpec, left_dense, mixer, no_attention

MLP = MLPSpec(gate="feed_forward.gate_proj", up="feed_forward.up_proj", down="feed_forward.down_proj")
BAMBA = replace(
    LLAMA, model_type="bamba", mixers=(MAMBA,), mlp=MLP, middle="pre_ff_layernorm", norms=None, returns_tuple=True
)
BESIDE = left_dense(LLAMA.attention, "Mamba stands beside it, and factors before and behind its layers")

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
    replace(BAMBA, model_type="falcon_h1", attention=BESIDE, mixers=(BESIDE,), adds=False),
    replace(
        LLAMA,
        model_type="nemotron_h",
        attention=replace(LLAMA.attention, path="mixer", position="none"),
        mixers=(mixer("mixer", STATE), no_attention("mixer.down_proj")),
        mlp=MLPSpec(up="mixer.up_proj", down="mixer.down_proj"),
        middle=None,
        norms=None,
    ),
)
