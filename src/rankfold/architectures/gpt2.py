"""GPT-2: `Conv1D` weights stored (in, out), fused q/k/v, learned positions."""

from .spec import Architecture, AttentionSpec, MLPSpec, NormsSpec

ARCHITECTURES = (
    Architecture(
        model_type="gpt2",
        blocks="transformer.h",
        attention=AttentionSpec(
            path="attn",
            qkv=("c_attn",),
            layout="concat",
            output="c_proj",
            kv_heads=None,
            position="none",
            width=None,
            dropout="attn_dropout",
            output_dropout="resid_dropout",
        ),
        mlp=MLPSpec(up="mlp.c_fc", down="mlp.c_proj", width="n_inner", activation="mlp.act"),
        middle="ln_2",
        norms=NormsSpec(("ln_1",), ("ln_2",), is_layernorm=True),
    ),
)
