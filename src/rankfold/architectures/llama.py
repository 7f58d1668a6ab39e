"""Llama and the families that share its block: separate projections, rotary embedding, gated MLP."""

from dataclasses import replace

from .spec import Architecture, AttentionSpec, MLPSpec, NormsSpec

LLAMA = Architecture(
    model_type="llama",
    blocks="model.layers",
    attention=AttentionSpec(path="self_attn", qkv=("q_proj", "k_proj", "v_proj"), output="o_proj"),
    mlp=MLPSpec(gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj", activation="mlp.act_fn"),
    norms=NormsSpec(),
)
ADJACENT = replace(LLAMA.attention, pairs="adjacent")

ARCHITECTURES = (
    LLAMA,
    replace(LLAMA, model_type="mistral"),
    replace(LLAMA, model_type="seed_oss", attention=replace(LLAMA.attention, output_dropout="residual_dropout")),
    replace(LLAMA, model_type="smollm3", attention=replace(LLAMA.attention, rotates="use_rope")),
    replace(LLAMA, model_type="ernie4_5", attention=ADJACENT),
    replace(LLAMA, model_type="helium", attention=replace(ADJACENT, width=None)),  # its output projection is square
)
