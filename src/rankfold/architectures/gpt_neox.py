"""GPT-NeoX and Pythia: q, k, v interleaved per head, partial rotary embedding, parallel residual (by config)."""

from .spec import Architecture, AttentionSpec, MLPSpec

ARCHITECTURES = (
    Architecture(
        model_type="gpt_neox",
        blocks="gpt_neox.layers",
        attention=AttentionSpec(
            path="attention", qkv=("query_key_value",), layout="grouped", output="dense", kv_heads=None
        ),
        mlp=MLPSpec(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
        middle=None,
    ),
)
