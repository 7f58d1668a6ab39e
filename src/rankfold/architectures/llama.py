"""Llama and the families that share its block: separate projections, rotary embedding, gated MLP."""

from dataclasses import replace

from .spec import Architecture, AttentionSpec, MLPSpec

LLAMA = Architecture(
    model_type="llama",
    blocks="model.layers",
    attention=AttentionSpec(path="self_attn", qkv=("q_proj", "k_proj", "v_proj"), output="o_proj"),
    mlp=MLPSpec(gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj"),
)

ARCHITECTURES = (LLAMA, replace(LLAMA, model_type="mistral"))
