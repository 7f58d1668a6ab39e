"""The public functions: an argument of a wrong type is refused in one line before anything runs."""

from collections.abc import Callable

from ._utils.arguments import typed
from .checkpoint.load import load_model
from .checkpoint.saving import save_model
from .components import compress_parts
from .data.load import load_calibration
from .evaluation.perplexity import perplexity
from .evaluation.text import evaluate_text
from .exports import export
from .methods import make_method
from .models.dense_model import DenseModel, open_model
from .pipeline import calibrate, compress, plan

__all__ = [
    "calibrate",
    "compress",
    "compress_parts",
    "evaluate_text",
    "export",
    "load",
    "load_calibration",
    "make_method",
    "open_model",
    "perplexity",
    "plan",
    "save",
]

calibrate, compress, compress_parts, plan = map(typed, (calibrate, compress, compress_parts, plan))
evaluate_text, export, make_method = map(typed, (evaluate_text, export, make_method))
load, save = map(typed, (load_model, save_model))
perplexity = typed(perplexity)
open_model = typed(open_model, tokenizer=Callable | None)
# Calibration lies below the models, so its functions cannot name them.
load_calibration = typed(load_calibration, model=DenseModel, tokenizer=Callable | None)
