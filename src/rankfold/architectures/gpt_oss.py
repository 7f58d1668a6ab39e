"""GPT-OSS: experts with biases and a gate of their own; attention with sinks."""

from dataclasses import replace

from .llama import LLAMA
from .spec import ExpertsSpec

ARCHITECTURES = (
    replace(
        LLAMA,
        model_type="gpt_oss",
        attention=replace(LLAMA.attention, sinks="sinks"),
        mlp=None,
        experts=ExpertsSpec(transposed=True, interleaved=True, width="intermediate_size"),
        norms=None,
    ),
)
