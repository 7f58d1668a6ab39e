"""CLIP and SigLIP: a tower for texts and a like one for images; and towers that others made of the latter."""

from dataclasses import replace

from .spec import Architecture, AttentionSpec, MLPSpec

CLIP = Architecture(
    model_type="clip_vision_model",
    blocks="encoder.layers",
    attention=AttentionSpec(
        path="self_attn",
        qkv=("q_proj", "k_proj", "v_proj"),
        output="out_proj",
        kv_heads=None,
        position="none",
        width=None,
        scaling="scale",
        dropout="dropout",
    ),
    mlp=MLPSpec(up="mlp.fc1", down="mlp.fc2"),
    middle="layer_norm2",
    decoder=False,
)
TOWERS = ("clip_text_model", "clip_vision_model", "siglip_text_model", "siglip_vision_model")
TOWERS += ("idefics3_vision", "smolvlm_vision")
ARCHITECTURES = tuple(replace(CLIP, model_type=name) for name in TOWERS)
