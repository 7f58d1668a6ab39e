"""Which families are known, by ``config.model_type``."""

from dataclasses import replace

from torch import nn

from ..errors import UnsupportedModelError, suggestion
from . import (
    bloom,
    cohere,
    exaone,
    falcon,
    gemma,
    glm,
    gpt2,
    gpt_neox,
    granite,
    llama,
    mixtral,
    olmo,
    opt,
    phi,
    qwen,
    stablelm,
    ungated,
)
from .spec import Architecture

__all__ = ["architecture_for", "architecture_of", "known_architectures"]

_FAMILIES = (llama, qwen, gemma, phi, granite, olmo, cohere, glm, exaone, stablelm, ungated) + (
    opt,
    gpt2,
    gpt_neox,
    falcon,
    bloom,
    mixtral,
)
_BY_TYPE = {a.model_type: a for family in _FAMILIES for a in family.ARCHITECTURES}


def known_architectures() -> tuple[Architecture, ...]:
    """All families, ordered by ``model_type``."""
    return tuple(_BY_TYPE[name] for name in sorted(_BY_TYPE))


def architecture_for(model_type: str) -> Architecture:
    """The family of a ``config.model_type``.

    Raises:
        UnsupportedModelError: unknown type; the message names close and available ones and what a spec needs.
    """
    if model_type in _BY_TYPE:
        return _BY_TYPE[model_type]
    raise UnsupportedModelError(
        f"model type {model_type!r} is not supported; {suggestion(model_type, _BY_TYPE)}available: "
        f"{', '.join(sorted(_BY_TYPE))}. A new family needs one spec: the paths of its blocks, q/k/v/o and MLP projections "
        "(docs/add-an-architecture.md)"
    )


def architecture_of(model: nn.Module) -> Architecture:
    """The family of a transformers model; of a model for images and text, the family of its language model.

    Raises:
        UnsupportedModelError: unknown type, or a trait that no spec can say.
    """
    text = model.config.get_text_config()
    found = architecture_for(text.model_type)
    for field, reason in found.unless:
        if getattr(text, field, None):
            raise UnsupportedModelError(
                f"this {text.model_type} has {field}={getattr(text, field)!r}: {reason}; models of this family without it work"
            )
    if text is model.config:
        return found
    base, _, path = found.blocks.partition(".")
    return replace(found, blocks=f"{base}.language_model.{path}")
