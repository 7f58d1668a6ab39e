"""EXAONE 4: norms after each half and over heads of q and k; with windows, only layers that slide rotate. EXAONE MoE:
the same attention, norms before each half, and DeepSeek's experts."""

from dataclasses import replace

from .deepseek import EXPERTS
from .gemma import NORMS_AFTER
from .llama import LLAMA
from .spec import ByConfig

ATTENTION = replace(
    LLAMA.attention,
    qk_norm=("q_norm", "k_norm"),
    applies_rope=ByConfig("sliding_window", yes="is_sliding", no=None),
)

ARCHITECTURES = (
    replace(
        LLAMA, model_type="exaone4", attention=ATTENTION, middle="mlp", is_plain_residual=False, norms_after=NORMS_AFTER
    ),
    replace(LLAMA, model_type="exaone_moe", attention=ATTENTION, experts=replace(EXPERTS, count="num_experts")),
)
