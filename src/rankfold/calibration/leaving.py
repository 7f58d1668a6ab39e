"""Leave a forward early, once all that is measured has been seen."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import nn

from ..architectures import BlockView
from .statistics import last_place


class Left(Exception):
    """Leaves a forward whose rest is not needed: a model's before norm and head, a block's where all is seen."""


class Hooked(Protocol):
    """What hangs hooks on a block."""

    def hooks(self) -> Iterable[Any]:
        """Hang them; returns their handles."""
        ...


class InFrontOf:
    """Leaves every forward before a layer."""

    def __init__(self, layer: nn.Module):
        self.layer = layer

    def hooks(self):
        return [self.layer.register_forward_pre_hook(self._leave)]

    def _leave(self, *_) -> None:
        raise Left


class BehindAll:
    """Leaves every forward of a block behind the last of some layers, in whatever order they run."""

    def __init__(self, block: nn.Module, layers: Iterable[nn.Module]):
        self.block, self.layers = block, set(layers)
        self.waiting: set[nn.Module] = set()

    def hooks(self):
        begin = self.block.register_forward_pre_hook(lambda *_: self.waiting.update(self.layers))
        return [begin, *(layer.register_forward_hook(self._ran) for layer in self.layers)]

    def _ran(self, layer: nn.Module, *_) -> None:
        self.waiting.discard(layer)
        if not self.waiting:
            raise Left


def ends(view: BlockView, statistics: set[str]) -> list[Hooked]:
    """Return what leaves a forward where these statistics are seen; nothing where it goes to its end."""
    place = last_place(statistics)
    if place == "projections" and view.attention.spec.qkv:
        return [BehindAll(view.module, view.attention.qkv_modules)]
    if place in ("projections", "attention"):
        return [InFrontOf(view.attention.output_module)]
    return [InFrontOf(view.module.get_submodule(view.mlp.spec.down))] if place == "mlp" and view.mlp else []


@contextlib.contextmanager
def watched(*watching: Hooked) -> Iterator[None]:
    """Hang hooks for a while; of one layer they run in this order, so what leaves the forward comes last."""
    handles = [handle for one in watching for handle in one.hooks()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
