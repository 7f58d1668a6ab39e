"""Families with Llama's attention and an MLP without gate: StarCoder 2, Arcee, Nemotron, Apertus."""

from dataclasses import replace

from .llama import LLAMA
from .spec import MLPSpec, NormsSpec

ARCEE = replace(LLAMA, model_type="arcee", mlp=MLPSpec(up="mlp.up_proj", down="mlp.down_proj", activation="mlp.act_fn"))

ARCHITECTURES = (
    ARCEE,
    replace(ARCEE, model_type="nemotron", norms=NormsSpec(is_layernorm=True, offset=1.0)),
    replace(
        ARCEE,
        model_type="apertus",
        attention=replace(LLAMA.attention, qk_norm=("q_norm", "k_norm")),
        middle="feedforward_layernorm",
        norms=NormsSpec(("attention_layernorm",), ("feedforward_layernorm",)),
    ),
    replace(
        LLAMA,
        model_type="starcoder2",
        attention=replace(LLAMA.attention, output_dropout="residual_dropout"),
        mlp=MLPSpec(up="mlp.c_fc", down="mlp.c_proj", activation="mlp.act"),
        norms=NormsSpec(is_layernorm=True),
    ),
)
