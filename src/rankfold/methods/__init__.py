"""Compression methods. Each is imported when it is first used; :mod:`.registry` lists them."""

from typing import TYPE_CHECKING

from .._utils.lazy import importing
from .registry import METHODS, as_method, make_method, method_class, method_names, register_method

if TYPE_CHECKING:
    from .base import BlockResult, CompressionStep, Curve, MeasurableMethod, Method, NarrowingMethod, PrunableModule
    from .baselines.block_removal import BLOCK, SLEB, ShortGPT
    from .baselines.semi_structured import PrunerZero, SparseGPT, TwoOfFour, Wanda
    from .baselines.slicegpt import SliceGPT, SliceGPTMoDeGPT
    from .baselines.structured import FLAP, KOBD, OBD, LLMPruner, LLMSurgeon, Magnitude, Strided
    from .baselines.svd_family import ASVD, FWSVD, SVD, SVDLLM, Bolaco, RootCov
    from .latentllm import LatentLLM
    from .modegpt import MoDeGPT
    from .rankfold import Rankfold
    from .targets import TARGETS, fitted

__all__ = [
    "ASVD",
    "BLOCK",
    "FLAP",
    "FWSVD",
    "KOBD",
    "METHODS",
    "OBD",
    "SLEB",
    "SVD",
    "SVDLLM",
    "TARGETS",
    "BlockResult",
    "Bolaco",
    "CompressionStep",
    "Curve",
    "LLMPruner",
    "LLMSurgeon",
    "LatentLLM",
    "Magnitude",
    "MeasurableMethod",
    "Method",
    "MoDeGPT",
    "NarrowingMethod",
    "PrunableModule",
    "PrunerZero",
    "Rankfold",
    "RootCov",
    "ShortGPT",
    "SliceGPT",
    "SliceGPTMoDeGPT",
    "SparseGPT",
    "Strided",
    "TwoOfFour",
    "Wanda",
    "as_method",
    "fitted",
    "make_method",
    "method_class",
    "method_names",
    "register_method",
]

_OTHERS = {
    ".base": (
        "BlockResult",
        "Curve",
        "MeasurableMethod",
        "Method",
        "NarrowingMethod",
        "CompressionStep",
        "PrunableModule",
    ),
    ".baselines.block_removal": ("BLOCK",),
    ".baselines.semi_structured": ("TwoOfFour",),
    ".targets": ("TARGETS", "fitted"),
}
__getattr__, __dir__ = importing(
    __name__,
    {entry.class_name: f".{entry.module}" for entry in METHODS.values()}
    | {name: module for module, names in _OTHERS.items() for name in names},
    globals(),
)
