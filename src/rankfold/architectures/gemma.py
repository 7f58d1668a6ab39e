"""Gemma: Llama's block, and lost without its start token. Gemma 2 and 3: norms before and after each half of a block,
sliding windows, soft caps, q/k-norm (3). Gemma 4: a norm of values, keys and values that later blocks read, too, an
embedding of its own for every block, and experts beside the MLP, with norms of their own."""

from dataclasses import replace

from .._utils.present import present
from .llama import LLAMA
from .spec import ExpertsSpec, NormsSpec, left_dense

NORMS_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")

GEMMA = replace(LLAMA, model_type="gemma", norms=NormsSpec(offset=1.0), needs_start=True)
GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    middle="pre_feedforward_layernorm",
    is_plain_residual=False,
    norms_after=NORMS_AFTER,
    norms=NormsSpec(mlp=("pre_feedforward_layernorm",), offset=1.0),
)
GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    attention=replace(LLAMA.attention, qk_norm=("q_norm", "k_norm"), norm_offset=1.0),
)
GEMMA4 = replace(
    GEMMA2,
    model_type="gemma4_text",
    attention=replace(
        left_dense(LLAMA.attention, "it normalises values, and later blocks read its keys and values"),
        kv_heads=None,  # blocks differ in them
        cached="k_proj",
    ),
    mlp=replace(present(GEMMA2.mlp), width=None),  # twice as wide in blocks that read those of others
    experts=ExpertsSpec(
        path="experts",
        router="router",
        shared=GEMMA2.mlp,
        count="num_experts",
        active="top_k_experts",
        norms_after=("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
    ),
    norms=None,
    handed="hidden_size_per_layer_input",
)

ARCHITECTURES = (GEMMA, GEMMA2, GEMMA3, GEMMA4)
