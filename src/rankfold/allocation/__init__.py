"""How many ranks each module keeps: counts, importance scores, exact integer allocation."""

from .by_block import effective_rank, outlier_fraction
from .counting import COUNTS, block_weights, tensor_bytes, unique_parameters
from .influence import capped_sparsities, epsilon_for, softmax_sparsities
from .measured import Cost, cheapest, largest_sparsity
from .ranks import allocate, averages, budgets, check_reachable, removable, to_remove

__all__ = [
    "COUNTS",
    "Cost",
    "allocate",
    "averages",
    "block_weights",
    "budgets",
    "capped_sparsities",
    "cheapest",
    "check_reachable",
    "effective_rank",
    "epsilon_for",
    "largest_sparsity",
    "outlier_fraction",
    "removable",
    "softmax_sparsities",
    "tensor_bytes",
    "to_remove",
    "unique_parameters",
]
