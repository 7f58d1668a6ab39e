"""The stacks of blocks in a model and what runs each: most models have one, those for images and text have two.

Shape legend: B samples of a batch, T tokens, C channels, H x W pixels.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import OptionError, UnsupportedModelError, option
from .projector import PROJECTORS
from .registry import architecture_of, check_config, family_of
from .spec import Architecture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PARTS = ("vision", "projector", "language")  # in the order in which they are run


@dataclass(frozen=True)
class Part:
    """One stack of blocks."""

    name: str  # one of PARTS
    architecture: Architecture  # with the path of the blocks in the model
    network: str  # path of the module that embeds a batch and runs the blocks; empty for the model itself
    config: Any  # of this part
    chosen: bool = False  # out of more than one

    @property
    def takes_images(self) -> bool:
        return self.name != "language"

    @property
    def packed(self) -> bool:
        """Whether images of any size go through it, one after the other."""
        return self.architecture.attention.packed

    @property
    def input_name(self) -> str:
        """What its network calls a batch."""
        return "pixel_values" if self.takes_images else "input_ids"

    @property
    def positions(self) -> int | None:
        """Tokens of the longest window it takes, or patches of its images; ``None`` where the config names no limit."""
        if self.packed:
            return None
        if self.takes_images:
            return math.prod(size // patch for size, patch in zip(*self._sizes, strict=True))
        found = context_of(self.config)
        if found and self.architecture.positions_after_padding:
            return found - self.config.pad_token_id - 1
        return found

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of its images, which are all of one size."""
        return (self.config.num_channels, *self._sizes[0])

    def example(self, samples: int, length: int) -> Tensor | dict[str, Tensor]:
        """What goes into its network and needs no data: ids spread over the vocabulary, ``(B, length)``, or
        ``(B, C, H, W)`` noise; by name where the network takes more, one image of at least so many patches."""
        generator = torch.Generator().manual_seed(0)
        if self.packed:
            return self._patches(math.ceil((samples * length) ** 0.5), generator)
        if self.takes_images:
            return torch.randn((samples, *self.image_shape), generator=generator)
        vocabulary = self.config.vocab_size
        ids = torch.arange(length) * max(1, vocabulary // length) % vocabulary
        return ids.expand(samples, -1).contiguous()

    def length_of(self, batch: Tensor) -> int:
        """Tokens of a window, or patches of an image."""
        if not self.takes_images:
            return batch.shape[1]
        return math.prod(size // patch for size, patch in zip(batch.shape[2:], self._sizes[1], strict=True))

    def _patches(self, side: int, generator: torch.Generator) -> dict[str, Tensor]:
        """A square image of noise."""
        config = self.config
        side = math.ceil(side / config.spatial_merge_size) * config.spatial_merge_size
        numbers = config.in_channels * config.temporal_patch_size * config.patch_size**2
        pixels = torch.randn((side * side, numbers), generator=generator)
        return {"hidden_states": pixels, "grid_thw": torch.tensor([[1, side, side]])}

    @property
    def _sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Height and width of an image and of a patch."""
        both = (self.config.image_size, self.config.patch_size)
        image, patch = ((size, size) if isinstance(size, int) else tuple(size) for size in both)
        return image, patch


def context_of(config: Any) -> int | None:
    """Return the tokens of the longest sample a model takes by its config; ``None`` where that names no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def part_of(model: "PreTrainedModel", name: str | None = None) -> Part:
    """A part of a transformers model.

    Args:
        model: weights may be on the meta device.
        name: one of :data:`PARTS`; by default the part that writes text, or else the only one.

    Raises:
        OptionError: there is no such part, or there are two to choose from.
        UnsupportedModelError: see :func:`~.registry.architecture_of`.
    """
    towers, text = _towers(model), model.config.get_text_config()
    family = family_of(text)
    decodes = family.decoder if family else not towers or model.get_output_embeddings() is not None
    projector = _projector(model) if decodes and "vision" in towers else None
    names = [*(["language"] if decodes else []), *(["projector"] if projector else []), *towers]
    if name not in names if name is not None else len(names) > 1 and not decodes:
        advice = f"choose one with {option('component')}" if len(names) > 1 else "name none"
        has = f"has the component{'s' * (len(names) > 1)} {' and '.join(names)}"
        raise OptionError(
            f"{type(model).__name__} {has}, got {'none' if name is None else name or repr(name)}; {advice}"
        )
    if decodes and name in (None, "language"):
        return Part("language", architecture_of(model), "", text, chosen=name is not None)
    if name == "projector" and projector:
        vision: Any = model.get_submodule(towers["vision"])
        return Part(name, projector, projector.blocks.rpartition(".")[0], vision.config, chosen=True)
    return replace(_tower(model, name or names[0], towers), chosen=len(names) > 1)


def _projector(model: nn.Module) -> Architecture | None:
    """What makes tokens of patches, where that is an MLP."""
    for path, module in model.named_modules():
        for spec in PROJECTORS:
            if f".{path}".endswith(f".{spec.blocks}"):
                there = {name for name, _ in module.named_modules()}
                if spec.mlp and {spec.mlp.up, spec.mlp.down} <= there:
                    return replace(spec, blocks=path)
    return None


def _towers(model: nn.Module) -> dict[str, str]:
    """Paths of encoders of known families in a model, by what they take in."""
    found: dict[str, str] = {}
    module: Any
    for path, module in model.named_modules():
        family = family_of(module.config) if hasattr(module, "main_input_name") else None
        inside = any(path.startswith(f"{tower}.") for tower in found.values())
        if family is not None and not family.decoder and not inside:
            found.setdefault("vision" if "image" in module.input_modalities else "language", path)
    return found


def _tower(model: nn.Module, name: str, towers: dict[str, str]) -> Part:
    path = towers[name]
    module: Any = model.get_submodule(path)
    family = family_of(module.config)
    assert family is not None  # or it would not be among the towers
    _complete_names(module.config)
    check_config(family, module.config)
    blocks = _path_of(module, family.blocks)
    # A class with a head has the encoder inside; what the head is for only its user knows.
    base = module.base_model_prefix if blocks.partition(".")[0] == module.base_model_prefix else ""
    spec = replace(family, blocks=f"{path}.{blocks}".lstrip("."))
    return Part(name, spec, f"{path}.{base}".strip("."), module.config)


def _complete_names(config: Any) -> None:
    """Let the config of a tower answer to the usual names; Qwen's does from transformers 5.23 on."""
    usual = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
    missing = {name: own for name, own in usual.items() if not hasattr(config, name) and hasattr(config, own)}
    if missing:
        type(config).attribute_map = type(config).attribute_map | missing


def _path_of(module: nn.Module, blocks: str) -> str:
    """Where the list of blocks is, which stands deeper in a class with a head."""
    for name, found in module.named_modules():
        if isinstance(found, nn.ModuleList) and f".{name}".endswith(f".{blocks}"):
            return name
    raise UnsupportedModelError(
        f"{type(module).__name__} keeps its blocks elsewhere than in {blocks}; use the transformers of constraints.txt"
    )
