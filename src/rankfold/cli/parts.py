"""`--parts`: several parts of a model in one command."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import OptionError, check_choice
from . import common as c
from .calibration import CalibrationOptions
from .options import MethodOptions

if TYPE_CHECKING:
    from ..methods import Method

__all__ = ["methods_of_parts", "opened_parts", "show_parts"]


def methods_of_parts(sparsities: str, what: MethodOptions) -> "dict[str, Method]":
    """What is done to each part.

    Args:
        sparsities: of ``--parts``, e.g. ``language=0.3,vision=0.2``.

    Raises:
        OptionError: not sparsities of different parts, or an option that does not parse.
    """
    method = what.parse()
    if method.own_sparsities:
        raise OptionError(
            f"--parts gives each part its sparsity, --modules {what.modules} would take its place; name the modules only, e.g. "
            f"--modules {','.join(method.own_sparsities)}"
        )
    return {name: replace(method, sparsity=value) for name, value in _parse(sparsities).items()}


def _parse(text: str) -> dict[str, float]:
    from ..architectures import PARTS

    given = [item.partition("=")[::2] for item in text.split(",") if item.strip()]
    names = [name.strip() for name, _ in given]
    for name in names:
        check_choice("part", name, PARTS)
        if names.count(name) > 1:
            raise OptionError(f"--parts names {name!r} more than once; name it once")
    try:
        found = {name: float(value) for name, (_, value) in zip(names, given, strict=True)}
    except ValueError:
        raise OptionError(f"--parts takes a sparsity for each, e.g. language=0.3,vision=0.2; got {text!r}") from None
    if len(found) < 2:
        raise OptionError(
            f"--parts takes two parts or more, e.g. language=0.3,vision=0.2; got {text!r}; for one of them give --part and "
            "--sparsity"
        )
    return found


def opened_parts(
    model: str, methods: "dict[str, Method]", text: CalibrationOptions, dtype: str, device: str
) -> list[tuple]:
    """Each part of a model, what is done to it, and what it is calibrated on."""
    from ..architectures import PARTS
    from ..compression.validate_spec import validated
    from ..models.opening import open_model

    texts = text.of_parts([name for name in PARTS if name in methods])
    sources = [validated(open_model(model, dtype=dtype, device=device, component=name)) for name in texts]
    for source in sources:
        methods[source.part.name].supported_modules(source.architecture, source.meta_block(0))
    return [(source, methods[source.part.name], texts[source.part.name].load(source)) for source in sources]


def show_parts(folder: Path, as_json: bool) -> None:
    """Print what became of each part."""
    from ..report.commands import records_of
    from ..report.record import read_record

    records = records_of(read_record(folder))
    results = {record["plan"]["part"]: c.result_of(record) for record in records}
    c.emit({"output": str(folder), "parts": results}, as_json, lambda out: _show(folder, results, out))


def _show(folder: Path, results: dict[str, dict], out) -> None:
    for part, result in results.items():
        c.show_result(f"{folder}, {part}", result, out)
