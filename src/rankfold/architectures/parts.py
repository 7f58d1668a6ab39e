"""The stacks of blocks in a model and what runs each: most models have one, those for images and text have two.

Shape legend: B samples of a batch, T tokens, C channels, H x W pixels.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

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

    @property
    def takes_images(self) -> bool:
        return self.name == "vision"

    @property
    def input_name(self) -> str:
        """What its network calls a batch."""
        return "pixel_values" if self.takes_images else "input_ids"

    @property
    def positions(self) -> int | None:
        """Tokens of the longest window it can take; ``None`` where the config names no limit."""
        found = getattr(self.config, "max_position_embeddings", None)
        if found and self.architecture.positions_behind_padding:
            return found - self.config.pad_token_id - 1
        return found

    def example(self, samples: int, length: int) -> Tensor:
        """A batch that needs no data: ids spread over the vocabulary, ``(B, length)``, or ``(B, C, H, W)`` noise."""
        if self.takes_images:
            shape = (samples, self.config.num_channels, *_pair(self.config.image_size))
            return torch.randn(shape, generator=torch.Generator().manual_seed(0))
        vocabulary = self.config.vocab_size
        ids = torch.arange(length) * max(1, vocabulary // length) % vocabulary
        return ids.expand(samples, -1).contiguous()

    def length_of(self, batch: Tensor) -> int:
        """Tokens of a window, or patches of an image."""
        if not self.takes_images:
            return batch.shape[1]
        height, width = _pair(self.config.patch_size)
        return (batch.shape[2] // height) * (batch.shape[3] // width)


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
        name = "vision" if "image" in module.input_modalities else "language"
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


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)
