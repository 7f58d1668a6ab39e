"""DeepSeek V2 and V3: experts beside a shared one after the first blocks; latent attention. dots.llm1: such experts,
and Qwen3's attention. ERNIE 4.5 MoE: such experts without groups, and the attention of ERNIE 4.5."""

from dataclasses import replace

from .llama import GPTJ_ROPE, LLAMA
from .qwen import QWEN3
from .spec import AttentionSpec, ExpertsSpec, MLPSpec

LATENT = AttentionSpec(
    path="self_attn",
    qkv=(),
    output="o_proj",
    unsupported_reason="its keys and values are latents already, with rotated dimensions of their own",
    cached=("kv_lora_rank", "qk_rope_head_dim"),
    width=None,
)
SHARED = MLPSpec(
    gate="mlp.shared_experts.gate_proj",
    up="mlp.shared_experts.up_proj",
    down="mlp.shared_experts.down_proj",
    width=None,
    activation="mlp.shared_experts.act_fn",
)

EXPERTS = ExpertsSpec(shared=SHARED, width=None, groups=("n_group", "topk_group"))

DEEPSEEK = replace(LLAMA, model_type="deepseek_v3", attention=LATENT, experts=EXPERTS, norms=None)

ARCHITECTURES = (
    DEEPSEEK,
    replace(DEEPSEEK, model_type="deepseek_v2", experts=replace(EXPERTS, count="n_routed_experts")),
    replace(DEEPSEEK, model_type="glm4_moe_lite"),
    replace(QWEN3, model_type="dots1", experts=EXPERTS),
    replace(
        LLAMA,
        model_type="ernie4_5_moe",
        attention=GPTJ_ROPE,
        experts=replace(EXPERTS, count="num_experts", groups=None),
    ),
)
