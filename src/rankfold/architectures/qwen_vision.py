"""Qwen-VL's towers: images of any size, patch behind patch, with rotary embedding by row and by column."""

from dataclasses import replace

from .spec import Architecture, AttentionSpec, MLPSpec

QWEN2_VL = Architecture(
    model_type="qwen2_vl_vision",
    blocks="blocks",
    attention=AttentionSpec(
        path="attn", qkv=("qkv",), output="proj", layout="concat", kv_heads=None, width=None, packed=True
    ),
    mlp=MLPSpec(up="mlp.fc1", down="mlp.fc2", width=None),
    middle="norm2",
    decoder=False,
)
ARCHITECTURES = (
    QWEN2_VL,
    replace(
        QWEN2_VL,
        model_type="qwen2_5_vl_vision",
        mlp=MLPSpec(gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj"),
    ),
    *(
        replace(QWEN2_VL, model_type=f"{name}_vision", mlp=MLPSpec(up="mlp.linear_fc1", down="mlp.linear_fc2"))
        for name in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    ),
)
