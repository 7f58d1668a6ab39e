"""SliceGPT: the residual stream itself becomes narrower; see :mod:`.method`."""

from .combined import SliceGPTMoDeGPT
from .method import SliceGPT

__all__ = ["SliceGPT", "SliceGPTMoDeGPT"]
