"""The default method; see :mod:`.method`."""

from .method import Rankfold

__all__ = ["Rankfold"]
