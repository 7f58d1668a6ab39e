"""Parts of a model in one run: what sees first, so that what writes is fitted to what the smaller tower sends.

    dense model --- vision ---> OUT.partial/before/vision --- language ---> OUT.partial ---> OUT

Each part goes through the pipeline as it would alone; the parts before the last one are a run of this kind themselves. The run
is known by what all were given, so that the same call goes on wherever an earlier one was killed.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from ._utils.files import writing
from ._utils.stopwatch import timed_run
from .architectures import PARTS
from .checkpoint.run import Run
from .compression.budget import rank_options
from .compression.plan import check
from .compression.validate_spec import validated
from .data.calibration_data import CalibrationData
from .data.tokens import check_fits
from .errors import OptionError
from .methods import Method, as_method
from .models.dense_model import DenseModel, open_model
from .pipeline import carry_out, checked, compress
from .report.identity import dtype_name, run_identity
from .report.plan import Plan

__all__ = ["compress_parts"]


class _Given(NamedTuple):
    """One part, what to do to it, and what it is measured on."""

    source: DenseModel
    method: Method
    tokens: CalibrationData


def compress_parts(
    parts: Iterable[tuple[DenseModel, Method | str, CalibrationData]],
    output: str | Path,
    *,
    mode: str = "sequential",
    on_plan: Callable[[Plan, DenseModel], None] | None = None,
) -> Path:
    """Compress several parts of a model, each in its own way.

    Args:
        parts: of each part the open model (``open_model(model, part="vision")``, ``part="language"``), what to do, and what to
            calibrate on. They are compressed in the order in which an image goes through them, whatever their order here.
        output: folder to write (resumable).
        mode: of all, see :func:`rankfold.compress`.
        on_plan: called with the plan of a part, and the model it is about, before any block of that part is compressed.

    Returns:
        The folder written. Its record is that of the last part, with that of the part before it under ``before``.

    Raises:
        OptionError: not different parts of one model.
        OptionError, UnsupportedModelError, NumericsError, CheckpointError, DataError: as :func:`rankfold.compress`; what can be
            said of a part beforehand is said before another one is compressed.
    """
    in_turn = _in_order(parts)
    del parts
    for given in in_turn:
        _check(given, mode, output)
    del given
    return _compress_in_turn(in_turn, Path(output), mode, on_plan)


def _compress_in_turn(parts: list[_Given], output: Path, mode: str, on_plan) -> Path:
    """Takes each part out of the list when it is done: its source may hold all of the model."""
    if len(parts) == 1:
        source = parts[0].source
        return compress(*parts.pop(), output, mode=mode, on_plan=_telling(on_plan, source))
    run = Run(output, _identity(parts, mode))
    with run.working():
        if run.complete:  # what an earlier process could not rename any more
            return run.publish()
        last, place = parts.pop(), run.before / parts[-1].source.part.name
        if not place.exists():
            with writing(run.before):
                run.before.mkdir(exist_ok=True)
            _compress_in_turn(parts, place, mode, on_plan)
        parts.clear()
        with timed_run():
            source = _opened_again(place, last.source)
            return carry_out(source, *last[1:], None, run.identity, run, _telling(on_plan, source))


def _in_order(parts: Iterable[tuple[DenseModel, Method | str, CalibrationData]]) -> list[_Given]:
    """In which they are compressed."""
    found = [_given(part) for part in parts]
    names = [given.source.part.name for given in found]
    if len(names) < 2 or len(set(names)) < len(names):
        raise OptionError(
            f"compress_parts takes two or more of the parts {', '.join(PARTS)} of a model, got "
            f"{' and '.join(names) or 'none'}; open each with open_model(model, part=...)"
        )
    one = found[0].source
    for other in (given.source for given in found[1:]):
        if (one.name, one.dtype, one.model.config.to_dict()) != (other.name, other.dtype, other.model.config.to_dict()):
            raise OptionError(
                f"compress_parts takes parts of one model in one dtype, got {one.name} in {dtype_name(one)} and {other.name} "
                f"in {dtype_name(other)}; open the same model for each"
            )
    return sorted(found, key=lambda given: PARTS.index(given.source.part.name))


def _given(part: tuple[DenseModel, Method | str, CalibrationData]) -> _Given:
    """One part as it was given.

    Raises:
        OptionError: it is none.
    """
    kinds = (DenseModel, Method | str, CalibrationData)
    if not isinstance(part, tuple | list) or [*map(isinstance, part, kinds)] != [True] * 3 or len(part) != 3:
        raise OptionError(
            f"each of the parts is an open model (open_model(model, part=...)), a method and calibration data, got "
            f"{str(part)[:60]!r}"
        )
    return _Given(part[0], as_method(part[1]), part[2])


def _check(given: _Given, mode: str, output: str | Path) -> None:
    """Whatever would stop the second part only after the first is done."""
    source, method, tokens = given
    checked(method, tokens, None, mode, output)
    check_fits(tokens.ids, validated(source))
    if not method.budget.is_timed:  # which takes measuring
        check(rank_options(source, method), method)


def _identity(parts: list[_Given], mode: str) -> dict:
    """Of the last part, with that of the one before it in it, and so on."""
    *before, last = parts
    mine = run_identity(last.source, last.method, last.tokens.describe(), mode)
    return mine | ({"before": _identity(before, mode)} if before else {})


def _telling(on_plan: Callable[[Plan, DenseModel], None] | None, source: DenseModel) -> Callable[[Plan], None] | None:
    return on_plan and (lambda plan: on_plan(plan, source))


def _opened_again(place: Path, asked: DenseModel) -> DenseModel:
    """The part asked for, in the model whose other part is compressed."""
    source = open_model(place, dtype=dtype_name(asked), device=str(asked.device), part=asked.part.name)
    source.name, source.revision, source.autocast = asked.name, asked.revision, asked.autocast
    return source
