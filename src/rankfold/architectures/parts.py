"""The stacks of blocks in a model and what runs each: most models have one, those for images and text have two."""

from dataclasses import dataclass, replace

from torch import nn

from ..errors import OptionError, UnsupportedModelError
from .registry import architecture_of, check_config, family_of
from .spec import Architecture

__all__ = ["Part", "part_of"]


@dataclass(frozen=True)
class Part:
    """One stack of blocks."""

    name: str  # language, or vision
    architecture: Architecture  # with the path of the blocks in the model
    network: str  # path of the module that embeds a batch and runs the blocks; empty for the model itself
    config: object  # of this part
    chosen: bool = False  # out of more than one


def part_of(model: nn.Module, name: str | None = None) -> Part:
    """A part of a transformers model.

    Args:
        model: weights may be on the meta device.
        name: ``language`` or ``vision``; by default the part that writes text, or else the only one.

    Raises:
        OptionError: there is no such part, or there are two to choose from.
        UnsupportedModelError: see :func:`~.registry.architecture_of`.
    """
    towers, text = _towers(model), model.config.get_text_config()
    family = family_of(text)
    decodes = family.decoder if family else not towers or model.get_output_embeddings() is not None
    names = [*(["language"] if decodes else []), *towers]
    chosen = name or names[0]
    if chosen not in names or (name is None and len(names) > 1 and not decodes):
        raise OptionError(
            f"{type(model).__name__} has the part{'s' * (len(names) > 1)} {' and '.join(names)}, got "
            f"{name or 'none'}; choose one with --part"
        )
    if decodes and chosen == "language":
        return Part(chosen, architecture_of(model), "", text, chosen=name is not None)
    return replace(towers[chosen], chosen=len(names) > 1)


def _towers(model: nn.Module) -> dict[str, Part]:
    """Encoders of known families in a model, by what they take in."""
    found = {}
    for path, module in model.named_modules():
        family = family_of(module.config) if hasattr(module, "main_input_name") else None
        inside = any(path.startswith(tower.network) for tower in found.values())
        if family is None or family.decoder or inside:
            continue
        check_config(family, module.config)
        blocks = _path_of(module, family.blocks)
        head, _, _ = blocks.partition(".")
        base = head == module.base_model_prefix  # the class has a head, which only its user knows what to do with
        name = "vision" if module.main_input_name == "pixel_values" else "language"
        spec = replace(family, blocks=f"{path}.{blocks}".lstrip("."))
        found.setdefault(name, Part(name, spec, f"{path}.{head if base else ''}".strip("."), module.config))
    return found


def _path_of(module: nn.Module, blocks: str) -> str:
    """Where the list of blocks is, which stands deeper in a class with a head."""
    for name, found in module.named_modules():
        if isinstance(found, nn.ModuleList) and f".{name}".endswith(f".{blocks}"):
            return name
    raise UnsupportedModelError(
        f"{type(module).__name__} keeps its blocks elsewhere than in {blocks}; use the transformers of constraints.txt"
    )
