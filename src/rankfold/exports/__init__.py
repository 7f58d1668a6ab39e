"""Compressed checkpoints in forms that need no code of rankfold, and on the hub."""

from .export import FORMATS, Exported, RoundingText, export
from .hub import push

__all__ = ["FORMATS", "Exported", "RoundingText", "export", "push"]
