"""Tensors that lie in a checkpoint under other names than the model class has, or in parts: experts one by one.

Transformers knows which and how, for whole models; here it is asked about names, and the parts are joined when they are
read.
"""

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from .._utils.reporting import reporting
from ..errors import CheckpointError

JOINS = (MergeModulelist, Concatenate)  # what can be done with the parts of a tensor and nothing but them
NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Place:
    """Where a tensor lies."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    kind: str  # of its numbers, as safetensors names it: F32, BF16, I64, ...

    @property
    def parts(self) -> "tuple[Place, ...]":
        return (self,)

    def value(self, tensors: list[Tensor]) -> Tensor:
        """The tensor, out of its parts."""
        return tensors[0]


@dataclass(frozen=True)
class Joined:
    """A tensor that several in the files make up; see :class:`Place`."""

    name: str  # in the model
    parts: tuple[Place, ...]
    patterns: tuple[str, ...]  # of the converter, one a part
    converter: WeightConverter
    shape: tuple[int, ...]

    @property
    def file(self) -> Path:
        return self.parts[0].file

    @property
    def kind(self) -> str:
        return self.parts[0].kind

    def value(self, tensors: list[Tensor]) -> Tensor:
        return _join(self.name, self.converter, self.patterns, tensors)


Placed = Place | Joined


def converted(places: dict[str, Placed], model: PreTrainedModel) -> dict[str, Placed]:
    """Places by the names that transformers gives them when it loads this class; as they are where it does more than
    join.

    Args:
        places: by name in the files.
        model: may be empty.

    Raises:
        CheckpointError: parts of a tensor do not go together.
    """
    changes = get_model_conversion_mapping(model)
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    if not all(len(c.target_patterns) == 1 and all(isinstance(op, JOINS) for op in c.operations) for c in converters):
        return places
    renamings = [change for change in changes if change not in converters]
    found: dict[str, Any] = {}  # a place, or the parts of one
    for name in sorted(places, key=_in_order):
        target, converter, pattern = _renamed(name, renamings, converters)
        if converter is None:
            found[target] = places[name]
        else:
            found.setdefault(target, []).append((places[name], pattern, converter))
    return {name: _joined(name, place) if isinstance(place, list) else place for name, place in found.items()}


def _in_order(name: str) -> list:
    """Numbers as numbers: expert 10 comes behind expert 9."""
    return [int(part) if part.isdigit() else part for part in NUMBER.split(name)]


def _renamed(name: str, renamings: list, converters: list) -> tuple[str, WeightConverter | None, str | None]:
    for change in renamings:
        name, _ = change.rename_source_key(name)
    for converter in converters:
        target, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return target, converter, pattern
    return name, None, None


def _joined(name: str, found: list[tuple[Place, str, WeightConverter]]) -> Joined:
    places, patterns, converters = zip(*found, strict=True)
    kinds = sorted({place.kind for place in places})
    if len(kinds) > 1:
        raise CheckpointError(f"the parts of {name} hold {' and '.join(kinds)}; save the checkpoint in one dtype")
    empty = [torch.empty(place.shape, device="meta") for place in places]
    return Joined(name, places, patterns, converters[0], tuple(_join(name, converters[0], patterns, empty).shape))


def _join(name: str, converter: WeightConverter, patterns: tuple[str, ...], tensors: list[Tensor]) -> Tensor:
    fresh: Any = copy.deepcopy(converter)  # it collects tensors until they are converted
    for pattern, tensor in zip(patterns, tensors, strict=True):
        fresh.add_tensor(name, name, pattern, tensor)
    with reporting(CheckpointError, f"the parts of {name} do not go together", "download or copy the checkpoint again"):
        (joined,) = fresh.convert(name).values()
    return joined
