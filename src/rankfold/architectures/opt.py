"""OPT: ReLU, biases everywhere, learned positions, the MLP's layers directly in the block."""

from .spec import Architecture, AttentionSpec, MLPSpec

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
            dropout="dropout",
        ),
        mlp=MLPSpec(up="fc1", down="fc2"),
        middle="final_layer_norm",
    ),
)
