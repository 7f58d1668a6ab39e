"""Compression methods; importing this package registers all of them."""

from .base import (
    BlockResult,
    Method,
    Stage,
    Unit,
    as_method,
    make_method,
    method_class,
    method_names,
    register_method,
)
from .latentllm import ASVD, FWSVD, SVD, SVDLLM, Bolaco, LatentLLM, RootCov
from .modegpt import MoDeGPT
from .rankfold import Rankfold
from .removal import BLOCK, SLEB, ShortGPT
from .semi_structured import PrunerZero, SparseGPT, TwoOfFour, Wanda
from .slicegpt import SliceGPT, SliceGPTMoDeGPT
from .slicing import FLAP, KOBD, OBD, LLMPruner, LLMSurgeon, Magnitude, Strided
from .targets import TARGETS, fitted

__all__ = [
    "ASVD",
    "BLOCK",
    "FLAP",
    "FWSVD",
    "KOBD",
    "OBD",
    "SLEB",
    "SVD",
    "SVDLLM",
    "TARGETS",
    "BlockResult",
    "Bolaco",
    "LLMPruner",
    "LLMSurgeon",
    "LatentLLM",
    "Magnitude",
    "Method",
    "MoDeGPT",
    "PrunerZero",
    "Rankfold",
    "RootCov",
    "ShortGPT",
    "SliceGPT",
    "SliceGPTMoDeGPT",
    "SparseGPT",
    "Stage",
    "Strided",
    "TwoOfFour",
    "Unit",
    "Wanda",
    "as_method",
    "fitted",
    "make_method",
    "method_class",
    "method_names",
    "register_method",
]
