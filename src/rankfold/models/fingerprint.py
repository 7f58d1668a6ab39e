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
        config: what of the model's config matters.
        tensors: name and value, in an order that does not depend on how the model is stored.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in tensors:
        digest.update(f"{name} {list(tensor.shape)} {_numbers(tensor)}\n".encode())
    return digest.hexdigest()[:32]


def _numbers(tensor: Tensor) -> str:
    content = xxhash.xxh3_128()
    for part in tensor.detach().flatten().split(CHUNK):
        part = part.cpu()
        content.update((part.float() if part.is_floating_point() else part.to(torch.int64)).numpy().data)
    return content.hexdigest()
