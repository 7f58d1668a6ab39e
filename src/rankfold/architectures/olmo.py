"""OLMo: Llama's block, norms without weights. OLMo 2 and 3: norms after each half, and over all heads of q and k."""

from dataclasses import replace

from .gemma import BEHIND
from .llama import LLAMA
from .spec import ExpertsSpec, NormsSpec

NORMED = replace(LLAMA.attention, qk_norm=("q_norm", "k_norm"), norm_over="all heads")
OLMO2 = replace(LLAMA, model_type="olmo2", attention=NORMED, middle="mlp", adds=False, norms_behind=BEHIND)
CLIPPED = "it clips queries, keys and values, and what has fewer dimensions would be clipped otherwise"
CLIPS = (("clip_qkv", CLIPPED),)

ARCHITECTURES = (
    replace(LLAMA, model_type="olmo", norms=NormsSpec(centres=True), unless=CLIPS),
    OLMO2,
    replace(OLMO2, model_type="olmo3"),
    replace(
        LLAMA,
        model_type="olmoe",
        attention=NORMED,
        mlp=None,
        experts=ExpertsSpec(width="intermediate_size"),
        unless=CLIPS,
    ),
)
