"""Phi (parallel block, partial rotary embedding, biases everywhere) and Phi-3 (fused projections)."""

from .spec import Architecture, AttentionSpec, MLPSpec, NormsSpec

PHI = Architecture(
    model_type="phi",
    blocks="model.layers",
    attention=AttentionSpec(
        path="self_attn",
        qkv=("q_proj", "k_proj", "v_proj"),
        output="dense",
        qk_norm=("q_layernorm", "k_layernorm"),  # only where config.qk_layernorm asks for them
        norm_offset=None,
    ),
    mlp=MLPSpec(up="mlp.fc1", down="mlp.fc2", activation="mlp.activation_fn"),
    middle=None,
    norms=NormsSpec(mlp=("input_layernorm",), is_layernorm=True),
)

PHI3 = Architecture(
    model_type="phi3",
    blocks="model.layers",
    attention=AttentionSpec(path="self_attn", qkv=("qkv_proj",), layout="concat", output="o_proj", longrope=False),
    mlp=MLPSpec(up="mlp.gate_up_proj", fused_gate=True, down="mlp.down_proj", activation="mlp.activation_fn"),
    norms=NormsSpec(),
)

ARCHITECTURES = (PHI, PHI3)
