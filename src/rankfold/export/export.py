"""A compressed checkpoint in a form that needs no code of rankfold."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..checkpoint.compressed import open_compressed
from ..checkpoint.load import described
from ..checkpoint.saving import creating
from ..checkpoint.source import Source
from ..errors import OptionError, UnsupportedModelError, suggestion
from ..files import check_output
from ..verifying import TOLERANCE, Probe
from .folder import write_folder
from .form import Form, parameters, plain, stock_form

__all__ = ["FORMATS", "Exported", "Format", "export"]


@dataclass(frozen=True)
class Format:
    """One way out."""

    form: Callable[[Source], Form]
    write: Callable[[Source, Form, Path, Probe], float]
    what: str


FORMATS = {
    "stock": Format(
        stock_form, write_folder, "the stock class of the family, for everything that reads Hugging Face folders"
    ),
}


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        dense, compressed, exported: parameters of the three models.
        difference: of the logits of the exported and the compressed model on a short window, of their norm.
    """

    output: Path
    format: str
    dense: int
    compressed: int
    exported: int
    difference: float

    @property
    def kept(self) -> float:
        """Which part of the saving in parameters is left."""
        return (self.dense - self.exported) / (self.dense - self.compressed) if self.dense > self.compressed else 1.0


def export(model: str | Path, output: str | Path, format: str = "stock", *, dtype: str = "auto") -> Exported:
    """Write a compressed checkpoint in another form, padded with zeros as little as that form allows.

    Args:
        model: hub id or folder that `rankfold compress` wrote.
        output: folder or file to write; must not exist. It gets its name when it has been read back and computes what the
            compressed model computes.
        format: one of :data:`FORMATS`.
        dtype: what is written in: ``auto`` (as stored), ``float32``, ``bfloat16`` or ``float16``.

    Raises:
        OptionError: an unknown format, or a model that has that form already.
        UnsupportedModelError: the form cannot express the model.
        CheckpointError: the model cannot be read, the output cannot be written, or computes something else.
    """
    if format not in FORMATS:
        raise OptionError(f"unknown format {format!r}; {suggestion(format, FORMATS)}available: {', '.join(FORMATS)}")
    output, chosen = Path(output), FORMATS[format]
    check_output(output)
    source = open_compressed(model, dtype=dtype)
    if format == "stock" and described(source.model.config) is None:
        raise OptionError(f"{source.name} is a stock model already, nothing is to be exported: use it as it is")
    form = chosen.form(source)
    probe = Probe(source, TOLERANCE if source.dtype == torch.float32 else None)
    dense = Form(plain(source.model.config), source.architecture, {})
    counts = [parameters(m) for m in (dense.empty(), source.model, form.empty())]
    if counts[0] > counts[1] and counts[2] >= counts[0]:
        raise UnsupportedModelError(
            f"{type(source.model).__name__} can have none of the narrower widths of {source.name}: padded it would be as large "
            "as the dense model; serve the folder as it is (docs/serve.md)"
        )
    with creating(output) as place:
        difference = chosen.write(source, form, place, probe)
    return Exported(output, format, *counts, difference)
