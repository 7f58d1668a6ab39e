"""OPT: ReLU, biases everywhere, learned positions, the MLP's layers directly in the block."""

from .spec import Architecture, AttentionSpec, ByConfig, MLPSpec, NormsSpec

ARCHITECTURES = (
    Architecture(
        model_type="opt",
        blocks="model.decoder.layers",
        attention=AttentionSpec(
            path="self_attn",
            qkv=("q_proj", "k_proj", "v_proj"),
            output="out_proj",
            kv_heads=None,
            position="none",
            width=None,
            dropout="dropout",
        ),
        mlp=MLPSpec(up="fc1", down="fc2", width="ffn_dim", activation="activation_fn"),
        # OPT-350m normalises after each half, so its MLP reads the stream itself
        middle=ByConfig("do_layer_norm_before", yes="final_layer_norm", no="fc1"),
        is_plain_residual=ByConfig("do_layer_norm_before", yes=True, no=False),
        norms=NormsSpec(("self_attn_layer_norm",), ("final_layer_norm",), is_layernorm=True),
    ),
)
