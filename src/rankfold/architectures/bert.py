"""BERT and RoBERTa: norms after each half, learned positions, an output projection outside the attention module."""

from dataclasses import replace

from .spec import Architecture, AttentionSpec, MLPSpec

_DECODER = ("is_decoder", "its blocks then attend to another model's states, which no spec can say")
BERT = Architecture(
    model_type="bert",
    blocks="encoder.layer",
    attention=AttentionSpec(
        path="attention.self",
        qkv=("query", "key", "value"),
        output="attention.output.dense",
        outside=True,
        kv_heads=None,
        position="none",
        width=None,
        dropout="dropout",
    ),
    mlp=MLPSpec(up="intermediate.dense", down="output.dense"),
    middle="intermediate",
    is_plain_residual=False,
    decoder=False,
    unless=(_DECODER,),
)
ARCHITECTURES = (
    BERT,
    *(replace(BERT, model_type=name, positions_after_padding=True) for name in ("roberta", "xlm-roberta")),
)
