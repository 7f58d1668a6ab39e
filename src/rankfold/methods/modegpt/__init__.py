"""MoDeGPT; see :mod:`.method`."""

from .method import MoDeGPT

__all__ = ["MoDeGPT"]
