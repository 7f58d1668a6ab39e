"""Counts of a model against its tensors, one by one."""

import torch
from torch import nn

from rankfold.allocation import block_weights, tensor_bytes, unique_parameters


def model() -> nn.Module:
    """A matrix used twice, a norm, a stack of matrices in bf16, a buffer that is stored and one that is not."""
    out = nn.Module()
    out.embedding, out.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
    out.head = nn.Linear(4, 5)
    out.head.weight = out.embedding.weight
    out.experts = nn.Parameter(torch.zeros(2, 3, 4, dtype=torch.bfloat16))
    out.register_buffer("pairs", torch.zeros(7, dtype=torch.uint8))
    out.register_buffer("frequencies", torch.zeros(9), persistent=False)
    return out


def test_weights_have_two_dimensions_or_more_and_count_once():
    assert block_weights(model()) == 5 * 4 + 2 * 3 * 4


def test_parameters_count_once():
    assert unique_parameters(model()) == 5 * 4 + 2 * 3 * 4 + 2 * 4 + 5


def test_bytes_are_those_of_everything_stored_once():
    assert tensor_bytes(model()) == 4 * (5 * 4 + 2 * 4 + 5) + 2 * 2 * 3 * 4 + 7
