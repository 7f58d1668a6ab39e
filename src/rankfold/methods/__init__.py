"""Compression methods; importing this package registers all of them."""

from .base import BlockResult, Method, Unit, make_method, method_class, method_names, register_method
from .latentllm import ASVD, SVD, SVDLLM, LatentLLM, RootCov
from .modegpt import MoDeGPT

__all__ = [
    "ASVD",
    "SVD",
    "SVDLLM",
    "BlockResult",
    "LatentLLM",
    "Method",
    "MoDeGPT",
    "RootCov",
    "Unit",
    "make_method",
    "method_class",
    "method_names",
    "register_method",
]
