"""ViT and DINOv2: patches of an image in place of tokens."""

from dataclasses import replace

from .spec import Architecture, AttentionSpec, MLPSpec

VIT = Architecture(
    model_type="vit",
    blocks="layers",
    attention=AttentionSpec(
        path="attention", qkv=("q_proj", "k_proj", "v_proj"), output="o_proj", kv_heads=None, position="none"
    ),
    mlp=MLPSpec(up="mlp.fc1", down="mlp.fc2"),
    middle="layernorm_after",
    decoder=False,
)
ARCHITECTURES = (
    VIT,
    replace(
        VIT,
        model_type="dinov2",
        blocks="encoder.layer",
        middle="norm2",
        is_plain_residual=False,  # a learned factor stands behind each half
        unless=(("use_swiglu_ffn", "its gated MLP has other names than the plain one"),),
    ),
)
