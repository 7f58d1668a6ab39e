"""Compression methods; importing this package registers all of them."""

from .base import BlockResult, Method, Stage, Unit, make_method, method_class, method_names, register_method
from .latentllm import ASVD, SVD, SVDLLM, LatentLLM, RootCov
from .modegpt import MoDeGPT
from .rankfold import Rankfold
from .removal import BLOCK, SLEB, ShortGPT
from .slicing import FLAP, OBD, LLMPruner, Magnitude, Strided

__all__ = [
    "ASVD",
    "BLOCK",
    "FLAP",
    "OBD",
    "SLEB",
    "SVD",
    "SVDLLM",
    "BlockResult",
    "LLMPruner",
    "LatentLLM",
    "Magnitude",
    "Method",
    "MoDeGPT",
    "Rankfold",
    "RootCov",
    "ShortGPT",
    "Stage",
    "Strided",
    "Unit",
    "make_method",
    "method_class",
    "method_names",
    "register_method",
]
