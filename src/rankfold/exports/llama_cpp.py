"""What llama.cpp computes of what a model does; asked before its file format, a package of its own, is imported."""

import sys

from ..architectures import FIXED_ROTARY
from ..errors import UnsupportedModelError, option
from ..models.dense_model import DenseModel

FAMILIES = ("llama", "mistral")


def check_family(source: DenseModel) -> None:
    """Raise :class:`UnsupportedModelError` unless llama.cpp's ``llama`` and ``deci`` compute what the model does."""
    config = source.config  # other families have other fields
    if source.model.config.get_text_config() is not source.model.config:
        raise UnsupportedModelError(
            f"this form holds a model of text alone, and {source.name} is a {type(source.model).__name__}; use "
            f"{option('format', 'stock')}, and the converter of the engine you want"
        )
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    found = {
        "model type": (config.model_type, FAMILIES),
        "activation": (getattr(config, "hidden_act", None), ("silu", "swish")),
        "rotary embedding": (rotary, FIXED_ROTARY),
    }
    for what, (got, allowed) in found.items():
        if got not in allowed:
            raise UnsupportedModelError(
                f"this form takes a {what} out of {', '.join(allowed)}, got {got}; use {option('format', 'stock')}, "
                "and the converter of the engine you want"
            )


def context_of(config) -> int:
    """Return the tokens of the longest window that a file computes alike; neither arch has a sliding window."""
    return min(getattr(config, "sliding_window", None) or sys.maxsize, config.max_position_embeddings)
