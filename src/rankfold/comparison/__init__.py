"""Methods beside each other: a grid of methods and sparsities, all calibrated and measured alike."""

from .compare import CellRunner, compare
from .folder import Folder
from .grid import Cell, Form, cells_of
from .measures import Accuracies, Generations, Measures, Perplexities, Speed

__all__ = [
    "Accuracies",
    "Cell",
    "CellRunner",
    "Folder",
    "Form",
    "Generations",
    "Measures",
    "Perplexities",
    "Speed",
    "cells_of",
    "compare",
]
