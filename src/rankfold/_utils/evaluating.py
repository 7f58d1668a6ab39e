"""Run a model as it is used, and leave its modes as they were."""

import contextlib
import inspect
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache, PreTrainedModel


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Without dropout and the like; every module then has the mode back that its owner gave it."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def own_modes() -> Generator[None]:
    """Compute without the modes of PyTorch that the caller is in, which would change numbers or forbid training."""
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))  # which switches gradients on, too
        if torch.get_default_device().type != "cpu":  # only then, because it slows every call
            modes.enter_context(torch.device("cpu"))
        fastest = torch.accelerator.current_accelerator()
        for kind in ("cpu", *([fastest.type] if fastest else [])):
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        yield


def cache_for(model: "PreTrainedModel", cache: "Cache | None" = None) -> dict[str, Any]:
    """Return a cache of keys and values, empty if none is given, by the name that the model's forward gives it."""
    from transformers import DynamicCache

    taken = inspect.signature(model.forward).parameters  # `cache` from transformers 5.24 on
    cache = DynamicCache(config=model.config) if cache is None else cache
    return {"cache" if "cache" in taken else "past_key_values": cache}


def states_of_tokens(layer: Any) -> "list[Tensor]":
    """Return what a layer of a filled cache holds for each token, ``(B, ..., tokens, width)``; a state of one size, as
    of linear attention, is not among it."""
    held = (getattr(layer, name, None) for name in ("keys", "values", "indexer_keys"))
    return [states for states in held if states is not None]
