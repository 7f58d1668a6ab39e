"""Llama 4: experts in all blocks, or in every other one, that take what the router has multiplied."""

from dataclasses import replace

from .llama import LLAMA
from .spec import ExpertsSpec, MLPSpec, left_dense

MLP = MLPSpec(
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    width="intermediate_size_mlp",
    activation="feed_forward.activation_fn",
)
SHARED = MLPSpec(
    gate="feed_forward.shared_expert.gate_proj",
    up="feed_forward.shared_expert.up_proj",
    down="feed_forward.shared_expert.down_proj",
    width=None,  # one field of the config is its width and that of the experts
)

ARCHITECTURES = (
    replace(
        LLAMA,
        model_type="llama4_text",
        attention=left_dense(LLAMA.attention, "its queries grow with a position that it counts itself"),
        mlp=MLP,
        experts=ExpertsSpec(path="feed_forward.experts", transposed=True, shared=SHARED, width=None),
        norms=None,
    ),
)
