"""MPT: fused q, k, v; ALiBi, handed to the attention for all positions there may be."""

from .olmo import CLIPPED
from .spec import Architecture, AttentionSpec, MLPSpec, NormsSpec

ARCHITECTURES = (
    Architecture(
        model_type="mpt",
        blocks="transformer.blocks",
        attention=AttentionSpec(
            path="attn",
            qkv=("Wqkv",),
            layout="concat",
            output="out_proj",
            kv_heads=None,
            position="alibi",
            width=None,
            scaling="softmax_scale",
            dropout="attn_dropout_p",
        ),
        mlp=MLPSpec(up="ffn.up_proj", down="ffn.down_proj", width=None, activation="ffn.act"),
        middle="norm_2",
        norms=NormsSpec(("norm_1",), ("norm_2",), is_layernorm=True),
        returns_tuple=True,
        unless=(("attn_config.clip_qkv", CLIPPED),),
    ),
)
