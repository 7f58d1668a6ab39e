"""What tells two models apart: every weight and the config."""

import hashlib
import json
from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

CHUNK = 2**20  # numbers that are widened at once: few enough to stay in a processor's cache


def fingerprint(config: dict, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """32 hexadecimal digits over a config and all weights, whatever dtype they are held in.

    The weights go through xxh3, which is as fast as memory: it guards against mistakes, not against forgery.

    Args:
        config: of the model; what says by whom it was written and where it lies is left out.
        tensors: name and value, in an order that does not depend on how the model is stored.
    """
    digest = hashlib.sha256(json.dumps(_of_model(config), sort_keys=True, default=str).encode())
    for name, tensor in tensors:
        digest.update(f"{name} {list(tensor.shape)} {_numbers(tensor)}\n".encode())
    return digest.hexdigest()[:32]


def _of_model(config: dict) -> dict:
    """A config without what another version of transformers, or another place, writes into it."""
    found = {key: value for key, value in config.items() if key not in ("_model_name_or_path", "transformers_version")}
    return {key: _of_model(value) if isinstance(value, dict) else value for key, value in found.items()}


def _numbers(tensor: Tensor) -> str:
    content = xxhash.xxh3_128()
    for part in tensor.detach().flatten().split(CHUNK):
        part = part.cpu()
        content.update((part.float() if part.is_floating_point() else part.to(torch.int64)).numpy().data)
    return content.hexdigest()
