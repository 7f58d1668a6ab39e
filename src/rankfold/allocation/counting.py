"""Exact counts of a model: weights, parameters, bytes, cache.

All counts of a dense model can be made on the meta device.
"""

from torch import nn


def block_weights(block: nn.Module) -> int:
    """Count the weights of a block's linear maps: every parameter of two or more dimensions (3-D experts too)."""
    return sum(p.numel() for p in block.parameters() if p.dim() >= 2)


def unique_parameters(model: nn.Module) -> int:
    """Count the parameters of a model; a tied matrix counts once."""
    return sum(p.numel() for p in model.parameters())


def tensor_bytes(module: nn.Module) -> int:
    """Count the bytes of a module's parameters and persistent buffers; a tied matrix counts once."""
    state = module.state_dict(keep_vars=True)
    return sum(t.nbytes for t in {id(t): t for t in state.values()}.values())
