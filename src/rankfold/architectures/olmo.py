"""OLMo: Llama's block, norms without weights. OLMo 2 and 3: norms after each half, and over all heads of q and k.
FlexOlmo: OLMo 2 with OLMoE's experts. MiniMax M2: OLMoE's experts and attention, of which a part of each head rotates.
"""

from dataclasses import replace

from .gemma import NORMS_AFTER
from .llama import LLAMA
from .spec import ExpertsSpec, NormsSpec

NORMED = replace(LLAMA.attention, qk_norm=("q_norm", "k_norm"), norm_over="all heads")
OLMO2 = replace(
    LLAMA, model_type="olmo2", attention=NORMED, middle="mlp", is_plain_residual=False, norms_after=NORMS_AFTER
)
EXPERTS = ExpertsSpec(width="intermediate_size")
OLMOE = replace(LLAMA, attention=NORMED, mlp=None, experts=EXPERTS)
CLIPPED = "it clips queries, keys and values, and what has fewer dimensions would be clipped otherwise"
CLIPS = (("clip_qkv", CLIPPED),)

ARCHITECTURES = (
    replace(LLAMA, model_type="olmo", norms=NormsSpec(is_layernorm=True), unless=CLIPS),
    OLMO2,
    replace(OLMO2, model_type="olmo3"),
    replace(OLMOE, model_type="olmoe", unless=CLIPS),
    replace(OLMOE, model_type="minimax_m2"),
    replace(
        OLMO2, model_type="flex_olmo", mlp=None, experts=replace(EXPERTS, norms_after=(NORMS_AFTER[1], NORMS_AFTER[1]))
    ),
)
