"""GPT-Neo: scores are not scaled, and the attention of every second layer masks what is outside a window itself."""

from .spec import Architecture, AttentionSpec, MLPSpec, NormsSpec

ARCHITECTURES = (
    Architecture(
        model_type="gpt_neo",
        blocks="transformer.h",
        attention=AttentionSpec(
            path="attn.attention",
            qkv=("q_proj", "k_proj", "v_proj"),
            output="out_proj",
            kv_heads=None,
            position="none",
            window=("attention_type", "window_size"),
            width=None,
            scaling=1.0,
            dropout="attn_dropout",
            output_dropout="resid_dropout",
        ),
        mlp=MLPSpec(up="mlp.c_fc", down="mlp.c_proj", activation="mlp.act"),
        middle="ln_2",
        norms=NormsSpec(("ln_1",), ("ln_2",), is_layernorm=True),
        returns_tuple=True,
    ),
)
