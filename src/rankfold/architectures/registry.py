"""Which families are known, by ``config.model_type``."""

import importlib
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import UnsupportedModelError
from .derive import derive
from .spec import Architecture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The files beside this one that have families.
FAMILIES = (
    *("bert", "bloom", "clip", "cohere", "deepseek", "exaone", "falcon", "gemma", "glm", "gpt2", "gpt_neo", "gpt_neox"),
    *("gpt_oss", "gptj", "lfm2", "llama", "llama4", "mamba", "modernbert", "mpt", "olmo", "opt", "phi", "qwen"),
    *("qwen_vision", "ungated", "vit"),
)
_MODULES = (importlib.import_module(f"{__package__}.{name}") for name in FAMILIES)
_BY_TYPE: dict[str, Architecture] = {spec.model_type: spec for module in _MODULES for spec in module.ARCHITECTURES}


def known_architectures() -> tuple[Architecture, ...]:
    """All families, ordered by ``model_type``."""
    return tuple(_BY_TYPE[name] for name in sorted(_BY_TYPE))


def family_of(config: Any) -> Architecture | None:
    """The family of a config; ``None`` where it is not known."""
    return _BY_TYPE.get(config.model_type)


def check_stock(config: Any, instead: str) -> None:
    """Raise :class:`UnsupportedModelError` where nobody wrote down what fields of the config make the class narrower.

    Args:
        instead: what the caller can do.
    """
    if family_of(config) is None:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is not one of the families whose configs are known, so no stock model "
            f"of its class is narrower; {instead}"
        )


def architecture_of(model: "PreTrainedModel") -> Architecture:
    """The family of a transformers model that writes text; of one for images and text, the family of its language
    model.

    Of a type that is not known a spec that was read off its blocks, ``derived``: it may be wrong.

    Raises:
        UnsupportedModelError: a trait that no spec can say, or blocks that none can be read off.
    """
    text = model.config.get_text_config()
    found = family_of(text)
    if found is None:
        return derive(model)
    check_config(found, text)
    if found.experts and not getattr(text, found.experts.count, None):
        found = replace(found, experts=None)
    if text is model.config:
        return found
    return replace(found, blocks=f"{_tower(model, text)}.{found.blocks.partition('.')[2]}")


def _tower(model: nn.Module, config) -> str:
    """Path of the language model in one for images and text."""
    modules: Any = model.named_modules()
    parts = [(name, module.config) for name, module in modules if hasattr(module, "main_input_name")]
    found = [name for name, own in parts if own.model_type == config.model_type]
    if found:
        return found[-1]  # the innermost: Llama 4's is inside of a class with a head
    raise UnsupportedModelError(
        f"{type(model).__name__} has no part of the type {config.model_type!r} of its text config; give its language "
        "model alone"
    )


def check_config(family: Architecture, config: Any) -> None:
    """Raise :class:`UnsupportedModelError` where a model of a family has a trait that no spec can say."""
    for field, reason in family.unless:
        value = reduce(lambda part, name: getattr(part, name, None), field.split("."), config)
        if value:
            raise UnsupportedModelError(
                f"this {config.model_type} has {field}={value!r}: {reason}; models of this family without it work"
            )
