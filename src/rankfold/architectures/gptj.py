"""GPT-J: parallel block; rotary embedding in adjacent pairs, by angles that the attention makes itself."""

from importlib.metadata import version

from .spec import Architecture, AttentionSpec, MLPSpec, NormsSpec

BEFORE_5_24 = tuple(map(int, version("transformers").split(".")[:2])) < (5, 24)

ARCHITECTURES = (
    Architecture(
        model_type="gptj",
        blocks="transformer.h",
        attention=AttentionSpec(
            path="attn",
            qkv=("q_proj", "k_proj", "v_proj"),
            output="out_proj",
            kv_heads=None,
            rope_style="gptj",
            rotary_base=10000.0,
            width=None,
            scaling=None,
            dropout="attn_dropout",
            output_dropout="resid_dropout",
        ),
        mlp=MLPSpec(up="mlp.fc_in", down="mlp.fc_out", width="n_inner", activation="mlp.act"),
        middle=None,
        norms=NormsSpec(("ln_1",), ("ln_1",), is_layernorm=True),
        returns_tuple=BEFORE_5_24,
    ),
)
