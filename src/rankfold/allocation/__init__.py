"""How many ranks each module keeps: counts, importance scores, exact integer allocation."""

from .counting import block_weights, tensor_bytes, unique_parameters
from .influence import capped_sparsities, epsilon_for, softmax_sparsities
from .ranks import allocate, removable

__all__ = [
    "allocate",
    "block_weights",
    "capped_sparsities",
    "epsilon_for",
    "removable",
    "softmax_sparsities",
    "tensor_bytes",
    "unique_parameters",
]
