"""Experts with fewer hidden units than the model's config says.

Shape legend: E experts, D model width, R kept width.
"""

import copy

import torch
from torch import nn

__all__ = ["narrow_experts"]

WIDTHS = ("intermediate_dim", "intermediate_size")  # what families call the attribute that repeats the hidden width


def narrow_experts(spec: dict, dense: nn.Module) -> nn.Module:
    """The family's own module, and with it all kernels that transformers has for it, over narrower parameters.

    Args:
        spec: ``experts``, ``in``, ``width``, ``bias``, and whether weights are ``transposed``: (E, in, out).
        dense: the experts it replaces; its tensors are not looked at.
    """
    shared = {id(dense.config): dense.config} | {id(parameter): None for parameter in dense.parameters()}
    module = copy.deepcopy(dense, shared)  # which leaves out the parameters
    E, D, R = spec["experts"], spec["in"], spec["width"]
    for name, rows, columns in (("gate_up_proj", 2 * R, D), ("down_proj", D, R)):
        shape = (E, columns, rows) if spec["transposed"] else (E, rows, columns)
        setattr(module, name, nn.Parameter(torch.empty(shape)))
        if spec["bias"]:
            setattr(module, f"{name}_bias", nn.Parameter(torch.empty(E, rows)))
    for name in WIDTHS:
        if hasattr(module, name):
            setattr(module, name, R)
    return module
