"""GLM: half of each head rotates, in adjacent pairs; gate and up in one projection. GLM 4: norms after halves too.
GLM 4.5: DeepSeek's experts, and pairs half a width apart."""

from dataclasses import replace

from .deepseek import EXPERTS
from .llama import LLAMA
from .qwen import QWEN3
from .spec import MLPSpec

GLM = replace(
    LLAMA,
    model_type="glm",
    attention=replace(LLAMA.attention, rope_style="gptj"),
    mlp=MLPSpec(up="mlp.gate_up_proj", fused_gate=True, down="mlp.down_proj", activation="mlp.activation_fn"),
)

NORMS_AFTER = ("post_self_attn_layernorm", "post_mlp_layernorm")

ARCHITECTURES = (
    GLM,
    replace(GLM, model_type="glm4", is_plain_residual=False, norms_after=NORMS_AFTER),
    replace(QWEN3, model_type="glm4_moe", experts=EXPERTS),  # its q/k-norms are there where config.use_qk_norm says so
)
