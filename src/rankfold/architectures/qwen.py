"""Qwen2 (biases on q, k, v) and Qwen3 (norms over the head dimension of q and k), each with experts too, and what they
are in models that see images: there rotary tables hold positions of several kinds, which is nothing to a block."""

from dataclasses import replace

from .llama import LLAMA
from .spec import ExpertsSpec, MLPSpec

QWEN2 = replace(LLAMA, model_type="qwen2")
QWEN3 = replace(LLAMA, model_type="qwen3", attention=replace(LLAMA.attention, qk_norm=("q_norm", "k_norm")))
SHARED = MLPSpec(
    gate="mlp.shared_expert.gate_proj",
    up="mlp.shared_expert.up_proj",
    down="mlp.shared_expert.down_proj",
    width="shared_expert_intermediate_size",
    activation="mlp.shared_expert.act_fn",
)

ARCHITECTURES = (
    QWEN2,
    replace(QWEN2, model_type="qwen2_moe", experts=ExpertsSpec(shared=SHARED, count="num_experts")),
    QWEN3,
    replace(QWEN3, model_type="qwen3_moe", experts=ExpertsSpec()),
    *(replace(QWEN2, model_type=f"{name}_text") for name in ("qwen2_vl", "qwen2_5_vl")),
    replace(QWEN3, model_type="qwen3_vl_text", images_behind_blocks=True),
)
