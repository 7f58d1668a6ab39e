"""How many ranks each module keeps: budgets, allocations, exact counts.

An allocation is one file here and one entry of :data:`ALLOCATIONS` (docs/add-an-allocation.md); one of another package
adds itself to that table.
"""

from .base import Allocation, DenseModelMeasures, RanksBySparsity, Share
from .budget import BUDGETS, Budget, Bytes, ContextBudget, FLOPs, Latency, Parameters
from .by_cost import Greedy, LeastInfluence, Measured
from .cheapest import largest_sparsity
from .counting import block_weights, tensor_bytes, unique_parameters
from .influence import Influence, ModuleInfluence
from .named import from_text
from .owl import OWL
from .prunable import PrunableModule, RankCosts, Ranks
from .quality import LEAST, Lost, expected_loss, guessed_loss, next_sparsity
from .ranks import allocate, averages, check_reachable, shared_budgets, to_remove
from .spectrum import Spectrum
from .uniform import Uniform
from .zero_sum import ZeroSum

__all__ = [
    "ALLOCATIONS",
    "BUDGETS",
    "LEAST",
    "OWL",
    "Allocation",
    "Budget",
    "Bytes",
    "ContextBudget",
    "DenseModelMeasures",
    "FLOPs",
    "Greedy",
    "Influence",
    "Latency",
    "LeastInfluence",
    "Lost",
    "Measured",
    "ModuleInfluence",
    "Parameters",
    "PrunableModule",
    "RankCosts",
    "Ranks",
    "RanksBySparsity",
    "Share",
    "Spectrum",
    "Uniform",
    "ZeroSum",
    "allocate",
    "averages",
    "block_weights",
    "check_reachable",
    "expected_loss",
    "from_text",
    "guessed_loss",
    "largest_sparsity",
    "next_sparsity",
    "shared_budgets",
    "tensor_bytes",
    "to_remove",
    "unique_parameters",
]

ALLOCATIONS: dict[str, type[Allocation]] = {
    cls.name: cls
    for cls in (Uniform, Influence, ModuleInfluence, OWL, Spectrum, Measured, LeastInfluence, Greedy, ZeroSum)
}
