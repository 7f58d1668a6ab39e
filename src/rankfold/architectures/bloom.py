"""BLOOM: q, k, v interleaved per head, ALiBi, residual added inside the attention module."""

from .spec import Architecture, AttentionSpec, ByConfig, MLPSpec, NormsSpec

ARCHITECTURES = (
    Architecture(
        model_type="bloom",
        blocks="transformer.h",
        attention=AttentionSpec(
            path="self_attention",
            qkv=("query_key_value",),
            layout="grouped",
            output="dense",
            kv_heads=None,
            position="alibi",
            width=None,
            scaling="inv_norm_factor",
            output_dropout="hidden_dropout",
        ),
        mlp=MLPSpec(up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h", width=None, activation="mlp.gelu_impl"),
        is_plain_residual=ByConfig("apply_residual_connection_post_layernorm", yes=False, no=True),
        norms=NormsSpec(is_layernorm=True),
        returns_tuple=True,
    ),
)
