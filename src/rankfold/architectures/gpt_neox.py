"""GPT-NeoX and Pythia: q, k, v interleaved per head, partial rotary embedding, parallel residual (by config)."""

from .spec import Architecture, AttentionSpec, ByConfig, MLPSpec, NormsSpec

ARCHITECTURES = (
    Architecture(
        model_type="gpt_neox",
        blocks="gpt_neox.layers",
        attention=AttentionSpec(
            path="attention", qkv=("query_key_value",), layout="grouped", output="dense", kv_heads=None, width=None
        ),
        mlp=MLPSpec(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h", activation="mlp.act"),
        middle=ByConfig("use_parallel_residual", yes=None, no="post_attention_layernorm"),
        norms=NormsSpec(is_layernorm=True),
    ),
)
