"""Compression methods; importing this package registers all of them."""

from .base import BlockResult, Method, Unit, make_method, method_names, register_method
from .modegpt import MoDeGPT

__all__ = ["BlockResult", "Method", "MoDeGPT", "Unit", "make_method", "method_names", "register_method"]
