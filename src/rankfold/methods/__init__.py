"""Compression methods. Each is imported when it is first used; :mod:`.registry` lists them."""

from typing import TYPE_CHECKING

from .._utils.lazy import importing
from .registry import METHODS, as_method, make_method, method_class, method_names, register_method

if TYPE_CHECKING:
    from .base import BlockResult, CompressionStep, Curve, MeasurableMethod, Method, NarrowingMethod, PrunableModule
    from .baselines.block_removal import BLOCK
    from .baselines.reap import EXPERT_COUNT
    from .baselines.semi_structured import SparseGPT
    from .latentllm.method import LatentLLM
    from .modegpt.method import MoDeGPT
    from .rankfold.method import Rankfold
    from .targets import fitted

__all__ = [
    "BLOCK",
    "EXPERT_COUNT",
    "METHODS",
    "BlockResult",
    "CompressionStep",
    "Curve",
    "LatentLLM",
    "MeasurableMethod",
    "Method",
    "MoDeGPT",
    "NarrowingMethod",
    "PrunableModule",
    "Rankfold",
    "SparseGPT",
    "as_method",
    "fitted",
    "make_method",
    "method_class",
    "method_names",
    "register_method",
]

_BASE = ("BlockResult", "CompressionStep", "Curve", "MeasurableMethod", "Method", "NarrowingMethod", "PrunableModule")
__getattr__, __dir__ = importing(
    __name__,
    {entry.class_name: f".{entry.module}" for entry in METHODS.values()}
    | dict.fromkeys(_BASE, ".base")
    | {"BLOCK": ".baselines.block_removal", "EXPERT_COUNT": ".baselines.reap", "fitted": ".targets"},
    globals(),
)
