"""What stands between a vision tower and the language model of LLaVA and its kin: an MLP by itself."""

from .spec import Architecture, AttentionSpec, MLPSpec

PROJECTOR = Architecture(
    model_type="projector",
    blocks="multi_modal_projector",
    attention=AttentionSpec(
        path="",
        qkv=(),
        output="linear_2",
        outside=True,
        kv_heads=None,
        position="none",
        width=None,
        scaling=1.0,
        beyond="it has no attention",
    ),
    mlp=MLPSpec(up="linear_1", down="linear_2", width=None),
    middle=None,
    adds=False,
    decoder=False,
    projects=True,
)
