"""GPT-OSS: experts with biases and a gate of their own; attention with sinks."""

from dataclasses import replace

from .llama import LLAMA
from .spec import ExpertsSpec

SINKS = "every head has a sink, a learned score of its own in the softmax, which compressed attention does not have"

ARCHITECTURES = (
    replace(
        LLAMA,
        model_type="gpt_oss",
        attention=replace(LLAMA.attention, beyond=SINKS),
        mlp=None,
        experts=ExpertsSpec(transposed=True, interleaved=True, width="intermediate_size"),
        norms=None,
    ),
)
