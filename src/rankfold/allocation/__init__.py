"""How many ranks each module keeps: counts, importance scores, exact integer allocation."""

from .counting import COUNTS, block_weights, tensor_bytes, unique_parameters
from .influence import capped_sparsities, epsilon_for, softmax_sparsities
from .measured import Cost, cheapest, largest_sparsity
from .ranks import allocate, averages, removable, to_remove

__all__ = [
    "COUNTS",
    "Cost",
    "allocate",
    "averages",
    "block_weights",
    "capped_sparsities",
    "cheapest",
    "epsilon_for",
    "largest_sparsity",
    "removable",
    "softmax_sparsities",
    "tensor_bytes",
    "to_remove",
    "unique_parameters",
]
