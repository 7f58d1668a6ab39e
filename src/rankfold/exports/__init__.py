"""Compressed checkpoints in forms that need no code of rankfold."""

from .export import FORMATS, Exported, export

__all__ = ["FORMATS", "Exported", "export"]
