"""EXAONE 4: norms after each half and over heads of q and k; with windows, only layers that slide rotate."""

from dataclasses import replace

from .gemma import BEHIND
from .llama import LLAMA
from .spec import ByConfig

ARCHITECTURES = (
    replace(
        LLAMA,
        model_type="exaone4",
        attention=replace(
            LLAMA.attention,
            qk_norm=("q_norm", "k_norm"),
            rotates=ByConfig("sliding_window", yes="is_sliding", no=None),
        ),
        middle="mlp",
        adds=False,
        norms_behind=BEHIND,
    ),
)
