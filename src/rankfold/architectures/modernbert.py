"""ModernBERT: an encoder with rotary tables for global and for local layers, and no norm before the first layer."""

from .spec import Architecture, AttentionSpec, MLPSpec

ARCHITECTURES = (
    Architecture(
        model_type="modernbert",
        blocks="layers",
        attention=AttentionSpec(
            path="attn",
            qkv=("Wqkv",),
            layout="concat",
            output="Wo",
            kv_heads=None,
            width=None,
            scaling=None,
            output_dropout="attention_dropout",
        ),
        mlp=MLPSpec(up="mlp.Wi", down="mlp.Wo", fused_gate=True),
        middle="mlp_norm",
        decoder=False,
    ),
)
