"""What a model in memory was loaded from."""

import contextlib
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..errors import RankfoldError
from .hub import commit_of
from .weights import Weights


def commit_of_loaded(model: PreTrainedModel) -> str | None:
    """Return the commit on the hub that a model in memory was loaded at; ``None`` where that cannot be told.

    transformers keeps it up to 5.22. Of a later one it is that of the snapshot in the hub's cache that has the model's
    weights, where there is one only.
    """
    known, name = getattr(model.config, "_commit_hash", None), model.name_or_path
    if known or not name:
        return known
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    found = [folder for folder in cached.glob("*") if _has_weights_of(folder, model)]
    return commit_of(found[0]) if len(found) == 1 else None


def _has_weights_of(folder: Path, model: PreTrainedModel) -> bool:
    """Tell by its smallest matrix whether a model was loaded from a folder."""
    with contextlib.suppress(RankfoldError):  # it has no weights, or not all of them
        weights = Weights(folder)
        if weights.match(model):
            there = {name: x for name, x in model.state_dict().items() if x.dim() > 1 and name in weights.places}
            name = min(there, key=lambda name: there[name].numel())
            return torch.equal(weights.raw(name).to(there[name].dtype), there[name].cpu())
    return False
