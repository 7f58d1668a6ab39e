"""Falcon: multi-query or grouped-query attention in one fused projection, rotary or ALiBi, parallel block by config."""

from .spec import Architecture, AttentionSpec, ByConfig, MLPSpec, NormsSpec

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
            width=None,
            scaling="inv_norm_factor",
        ),
        mlp=MLPSpec(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h", width="ffn_hidden_size", activation="mlp.act"),
        middle=ByConfig("parallel_attn", yes=None, no="post_attention_layernorm"),
        norms=NormsSpec(
            ("input_layernorm", "ln_attn"), ("post_attention_layernorm", "ln_mlp", "input_layernorm"), is_layernorm=True
        ),
        returns_tuple=True,
    ),
)
