"""A compressed checkpoint in a form that needs no code of rankfold."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from .._utils.extras import require
from .._utils.files import check_output, write_text
from ..checkpoint.compressed import open_compressed
from ..checkpoint.load import described
from ..checkpoint.saving import creating
from ..compression.verify import TOLERANCE, Probe
from ..data.built_in import DEFAULT_TEXT
from ..data.calibration_data import CalibrationData
from ..data.load import load_calibration
from ..errors import OptionError, UnsupportedModelError, check_choice, option
from ..models.auto_classes import auto_class_name
from ..models.dense_model import DenseModel
from ..models.devices import resolve_dtype
from ..models.given import resolve_model
from ..report.identity import dtype_name
from ..report.model_card import card_metadata
from ..report.record import NAME, read_record, records_of
from ..version import __version__
from .deci import deci_form, write_deci
from .folder import write_folder
from .form import StockModel, parameters, plain, stock_form
from .gguf_blocks import FORMATS as BLOCK_FORMATS
from .gguf_blocks import ROUNDED
from .llama_cpp import ARCHS, OF_DECI, OF_LLAMA, check_family, check_own, context_of


@dataclass(frozen=True)
class Format:
    """One way out."""

    form: Callable[[DenseModel], StockModel]
    write: Callable[..., float]  # of source, form, path, probe; where it `quantises` also `dtype`, `base`, `tokens`
    what: str
    quantises: bool = False
    context: Callable[..., int | None] = lambda config: None  # of the config: longest window that is computed alike


def _write_gguf(*arguments, **settings) -> float:
    require("gguf", "a .gguf file")
    from .gguf_file import write_gguf

    return write_gguf(*arguments, **settings)


def _deci_folder(source: DenseModel) -> StockModel:
    check_family(source, OF_LLAMA)
    return deci_form(source)


def _gguf(source: DenseModel) -> StockModel:
    check_family(source, tuple(ARCHS))
    form = stock_form(source)
    check_own(form)
    return form


def _gguf_deci(source: DenseModel) -> StockModel:
    check_family(source, OF_DECI)
    return deci_form(source)


FORMATS = {
    "stock": Format(stock_form, write_folder, "the stock class of the family, all MLPs as wide as the widest"),
    "deci": Format(_deci_folder, write_deci, "DeciLM (Nemotron-NAS) for vLLM: Llama, every MLP with its own width"),
    "gguf": Format(
        _gguf, _write_gguf, "one file for llama.cpp and others, arch of the family: the same widths", True, context_of
    ),
    "gguf-deci": Format(
        _gguf_deci, _write_gguf, "one file for llama.cpp, arch deci: every MLP has its width", True, context_of
    ),
}
CARD = """{metadata}
# {title}

{base}, compressed by `{method}` and exported from `{source}` by rankfold {version} ({what}). \
It needs no code of rankfold.

| parameters | |
|---|---|
| dense | {dense} |
| compressed | {compressed} |
| here, padded with zeros | {exported} |
"""
GGUF = ".gguf"


@dataclass(frozen=True)
class RoundingText:
    """What ``q5_0`` and ``q4_0`` are rounded for; a few samples are enough where nothing is chosen by them.

    Args:
        calibration: text; see :func:`rankfold.data.load_calibration`, which has the other arguments too.
    """

    calibration: Any = DEFAULT_TEXT
    num_samples: int = 32
    max_length: int = 2048
    seed: int = 0
    text_column: str = "text"

    def given(self) -> list[str]:
        """Names of what is not as by default."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return [name for name, (mine, plain) in values.items() if type(mine) is not type(plain) or mine != plain]

    def load(self, source: DenseModel) -> CalibrationData:
        """Read and tokenise it."""
        return load_calibration(
            self.calibration,
            source,
            num_samples=self.num_samples,
            max_length=self.max_length,
            seed=self.seed,
            text_column=self.text_column,
        )


AS_BY_DEFAULT = RoundingText()


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


def export(
    model: str | Path,
    output: str | Path,
    format: str = "stock",
    *,
    dtype: str = "auto",
    text: RoundingText = AS_BY_DEFAULT,
) -> Exported:
    """Write a compressed checkpoint in another form, padded with zeros as little as that form allows.

    Args:
        model: hub id or folder that `rankfold compress` wrote; for GGUF files and ``deci`` also a dense model, as hub
            id, folder or ``.gguf`` file.
        output: folder or file to write; must not exist. It gets its name when it has been read back and computes what
            the compressed model computes.
        format: one of :data:`FORMATS`.
        dtype: what is written in: ``auto`` (as stored), ``float32``, ``bfloat16`` or ``float16``; GGUF files also
            ``q8_0``, ``q5_0`` and ``q4_0``.
        text: what ``q5_0`` and ``q4_0`` are rounded for.

    Raises:
        OptionError: an unknown format, a model that has that form already, or text where nothing is rounded for it.
        DataError: the text cannot be read.
        UnsupportedModelError: the form cannot express the model.
        CheckpointError: the model cannot be read, the output cannot be written, or computes something else.
    """
    check_choice("format", format, FORMATS)
    output, chosen, quantised = Path(output), FORMATS[format], dtype if dtype in BLOCK_FORMATS else None
    if output.suffix.lower() == GGUF and not format.startswith("gguf"):
        raise OptionError(
            f"{output.name} is the name of a GGUF file, and format {format} is a folder; give "
            f"{option('format', 'gguf')} or {option('format', 'gguf-deci')}, or another name"
        )
    if quantised and not chosen.quantises:
        raise OptionError(f"format {format} has no dtype {dtype}; choose auto, float32, bfloat16 or float16")
    if not quantised:
        resolve_dtype(dtype, BLOCK_FORMATS if chosen.quantises else ())
    given = text.given()
    if dtype not in ROUNDED and given:
        raise OptionError(
            f"{' and '.join(map(option, given))} would have no effect: of dtypes only {' and '.join(ROUNDED)} are "
            f"rounded for calibration text, got {option('dtype', dtype)}; leave it out"
        )
    check_output(output)
    folder, _ = resolve_model(model)
    source = open_compressed(folder, dtype="float32" if quantised else dtype)  # blocks are made of no rounded numbers
    if format == "stock" and described(source.model.config) is None:
        raise OptionError(f"{source.name} is a stock model already, nothing is to be exported: use it as it is")
    form = chosen.form(source)
    record = read_record(folder) if (folder / NAME).is_file() else None
    counts = _counts(source, form, record)
    exact = TOLERANCE if source.dtype == torch.float32 else None  # elsewhere a scale that is folded in is rounded
    probe = Probe(source, BLOCK_FORMATS[dtype].tolerance if quantised else exact, chosen.context(form.config))
    how: dict[str, Any] = {}
    if chosen.quantises:
        base = records_of(record)[0]["plan"]["model"] if record else source.name
        how = {"dtype": quantised or dtype_name(source), "base": base}
    if dtype in ROUNDED:
        how["tokens"] = text.load(source)
    with creating(output) as place:
        difference = chosen.write(source, form, place, probe, **how)
        done = Exported(output, format, *counts, difference)
        if place.is_dir():
            write_text(place / "README.md", _card(done, source, record))
    return done


def _card(done: Exported, source: DenseModel, record: dict[str, Any] | None) -> str:
    """README.md of an exported folder."""
    config: Any = source.model.config
    made = record or (config.quantization_config.fields if described(config) else {})
    base = made.get("base_model", source.name)
    return CARD.format(
        metadata=card_metadata(base, [], auto=auto_class_name(source.model)),
        base=base,
        method=made.get("method", "no method"),
        title=done.output.name,
        source=source.name,
        version=__version__,
        what=FORMATS[done.format].what,
        **{name: f"{getattr(done, name):,}" for name in ("dense", "compressed", "exported")},
    )


def _counts(source: DenseModel, form: StockModel, record: dict[str, Any] | None) -> tuple[int, int, int]:
    """Parameters of the dense, the compressed and the padded model.

    The config of a model that lost blocks or experts no longer says how many there were: the record does.
    """
    dense = StockModel(plain(source.model.config), source.architecture, {})
    compressed, padded = parameters(source.model), parameters(form.empty())
    whole = records_of(record)[0]["plan"]["parameters"] if record else parameters(dense.empty())
    if whole > compressed and padded >= whole:
        raise UnsupportedModelError(
            f"padded to what {type(source.model).__name__} can have, {source.name} would be as large as the dense "
            "model; serve the folder as it is (docs/serve.md)"
        )
    return whole, compressed, padded
