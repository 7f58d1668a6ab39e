"""Compression methods; importing this package registers all of them."""

from .base import BlockResult, Method, Stage, Unit, make_method, method_class, method_names, register_method
from .latentllm import ASVD, SVD, SVDLLM, LatentLLM, RootCov
from .modegpt import MoDeGPT
from .rankfold import Rankfold

__all__ = [
    "ASVD",
    "SVD",
    "SVDLLM",
    "BlockResult",
    "LatentLLM",
    "Method",
    "MoDeGPT",
    "Rankfold",
    "RootCov",
    "Stage",
    "Unit",
    "make_method",
    "method_class",
    "method_names",
    "register_method",
]
