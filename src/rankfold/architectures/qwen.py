"""Qwen2 (biases on q, k, v) and Qwen3 (norms over the head dimension of q and k), each with experts too, and what they
are in models that see images: there rotary tables hold positions of several kinds, which is nothing to a block.
Qwen3-Next and Qwen3.5: gated attention in every fourth block, linear attention in the others."""

from dataclasses import replace

from .llama import LLAMA
from .spec import AttentionSpec, ExpertsSpec, MLPSpec, mixer

QWEN2 = replace(LLAMA, model_type="qwen2")
QWEN3 = replace(LLAMA, model_type="qwen3", attention=replace(LLAMA.attention, qk_norm=("q_norm", "k_norm")))
SHARED = MLPSpec(
    gate="mlp.shared_expert.gate_proj",
    up="mlp.shared_expert.up_proj",
    down="mlp.shared_expert.down_proj",
    width="shared_expert_intermediate_size",
    activation="mlp.shared_expert.act_fn",
)
BESIDE_SHARED = ExpertsSpec(shared=SHARED, count="num_experts")
QWEN3_5 = replace(
    LLAMA,
    model_type="qwen3_5_text",
    attention=AttentionSpec(
        path="self_attn",
        qkv=(),
        output="o_proj",
        unsupported_reason="gates stand between its values and its output projection",
        width=None,
    ),
    mixers=(mixer("linear_attn", "it has a state in place of keys and values"),),
    norms=None,
)

ARCHITECTURES = (
    QWEN2,
    replace(QWEN2, model_type="qwen2_moe", experts=BESIDE_SHARED),
    QWEN3,
    replace(QWEN3, model_type="qwen3_moe", experts=ExpertsSpec()),
    *(replace(QWEN2, model_type=f"{name}_text") for name in ("qwen2_vl", "qwen2_5_vl")),
    replace(QWEN3, model_type="qwen3_vl_text", images_after_blocks=True),
    replace(QWEN3, model_type="qwen3_vl_moe_text", images_after_blocks=True, experts=ExpertsSpec()),
    QWEN3_5,
    *(replace(QWEN3_5, model_type=name, experts=BESIDE_SHARED) for name in ("qwen3_5_moe_text", "qwen3_next")),
)
