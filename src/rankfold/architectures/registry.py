"""Which families are known, by ``config.model_type``."""

from dataclasses import replace
from functools import reduce

from torch import nn

from ..errors import UnsupportedModelError
from . import (
    bloom,
    cohere,
    exaone,
    falcon,
    gemma,
    glm,
    gpt2,
    gpt_neo,
    gpt_neox,
    gptj,
    granite,
    llama,
    mixtral,
    mpt,
    olmo,
    opt,
    phi,
    qwen,
    stablelm,
    ungated,
)
from .derive import derive
from .spec import Architecture

__all__ = ["architecture_of", "known_architectures"]

_FAMILIES = (llama, qwen, gemma, phi, granite, olmo, cohere, glm, exaone, stablelm, ungated) + (
    opt,
    gpt2,
    gpt_neo,
    gpt_neox,
    gptj,
    falcon,
    bloom,
    mpt,
    mixtral,
)
_BY_TYPE = {a.model_type: a for family in _FAMILIES for a in family.ARCHITECTURES}


def known_architectures() -> tuple[Architecture, ...]:
    """All families, ordered by ``model_type``."""
    return tuple(_BY_TYPE[name] for name in sorted(_BY_TYPE))


def architecture_of(model: nn.Module) -> Architecture:
    """The family of a transformers model; of a model for images and text, the family of its language model.

    Of a type that is not known a spec that was read off its blocks, ``derived``: it may be wrong.

    Raises:
        UnsupportedModelError: a trait that no spec can say, or blocks that none can be read off.
    """
    text = model.config.get_text_config()
    found = _BY_TYPE.get(text.model_type)
    if found is None:
        return derive(model)
    for field, reason in found.unless:
        value = reduce(lambda part, name: getattr(part, name, None), field.split("."), text)
        if value:
            raise UnsupportedModelError(
                f"this {text.model_type} has {field}={value!r}: {reason}; models of this family without it work"
            )
    if text is model.config:
        return found
    base, _, path = found.blocks.partition(".")
    return replace(found, blocks=f"{base}.language_model.{path}")
