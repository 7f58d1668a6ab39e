"""Falcon: multi-query or grouped-query attention in one fused projection, parallel block; rotary embedding or ALiBi."""

from .spec import Architecture, AttentionSpec, MLPSpec

ARCHITECTURES = (
    Architecture(
        model_type="falcon",
        blocks="transformer.h",
        attention=AttentionSpec(
            path="self_attention",
            qkv=("query_key_value",),
            layout="grouped",
            output="dense",
            kv_heads="module.num_kv_heads",
            scaling="inv_norm_factor",
        ),
        mlp=MLPSpec(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
        middle=None,
        returns_tuple=True,
    ),
)
