"""Components of a model in one run: each is fitted to what the smaller one before it sends.

    dense model --- vision ---> OUT.partial/before/vision --- language ---> OUT.partial ---> OUT

Each component goes through the pipeline as it would alone; those before the last one are a run of this kind themselves.
The run is known by what all were given, so that the same call goes on wherever an earlier one was killed.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ._utils.files import make_folder
from ._utils.processes import from_first, on_first
from ._utils.stopwatch import timed_run
from .architectures import PARTS
from .checkpoint.run import RunFolder
from .compression.budget import check_by_shapes
from .compression.result import CompressionResult
from .compression.validate_spec import validated
from .data.calibration_data import CalibrationData
from .data.tokens import check_fits
from .errors import OptionError
from .methods import Method, as_method
from .models.dense_model import DenseModel
from .models.opening import open_model
from .pipeline import CompressionRun, check_request, compress
from .report.identity import dtype_name, run_identity
from .report.plan import Plan

__all__ = ["compress_components"]

OnPlan = Callable[[Plan, DenseModel], None]


class _Component(NamedTuple):
    """One component, what to do to it, and what it is measured on."""

    source: DenseModel
    method: Method
    tokens: CalibrationData


def compress_components(
    components: Iterable[tuple[DenseModel, Method | str, CalibrationData]],
    output: str | Path,
    *,
    mode: str = "sequential",
    on_plan: OnPlan | None = None,
) -> CompressionResult:
    """Compress several components of a model, each in its own way.

    Args:
        components: of each the open model (``open_model(model, component="vision")``, ``component="language"``), what
            to do, and what to calibrate on. They are compressed in the order in which an image goes through them,
            whatever their order here.
        output: folder to write (resumable).
        mode: of all, see :func:`rankfold.compress`.
        on_plan: called with the plan of a component, and the model it is about, before any block of it is compressed.

    Returns:
        As :func:`rankfold.compress`; plan and record are those of the last component, with the record of the one before
        it under ``before``.

    Raises:
        OptionError: not different components of one model.
        OptionError, UnsupportedModelError, NumericsError, CheckpointError, DataError: as :func:`rankfold.compress`;
            what can be said of a component beforehand is said before another one is compressed.
    """
    in_turn = _in_order(components)
    del components
    for given in in_turn:
        _check(given, mode, output)
    del given
    return _compress_in_turn(in_turn, Path(output), mode, on_plan)


def _compress_in_turn(
    components: list[_Component], output: Path, mode: str, on_plan: OnPlan | None
) -> CompressionResult:
    """Take each component out of the list when it is done: its source may hold all of the model."""
    if len(components) == 1:
        source = components[0].source
        return compress(*components.pop(), output, mode=mode, on_plan=_with_source(on_plan, source))
    folder = RunFolder(output, from_first(lambda: _identity(components, mode)))
    with folder.working():
        if from_first(lambda: folder.complete):  # what an earlier process could not rename any more
            output = from_first(folder.publish)
            return CompressionResult.of_folder(output, device=str(components[-1].source.device))
        last, place = components.pop(), folder.before / components[-1].source.part.name
        if not from_first(place.exists):
            on_first(lambda: make_folder(folder.before))
            _compress_in_turn(components, place, mode, on_plan)
        components.clear()
        with timed_run():
            source = _opened_again(place, last.source)
            run = CompressionRun(source, *last[1:], None, folder.identity, folder)
            return run.carry_out(_with_source(on_plan, source))


def _in_order(components: Iterable[tuple[DenseModel, Method | str, CalibrationData]]) -> list[_Component]:
    """Return them in the order in which they are compressed."""
    found = [_given(component) for component in components]
    names = [given.source.part.name for given in found]
    if len(names) < 2 or len(set(names)) < len(names):
        raise OptionError(
            f"compress_components takes two or more of the components {', '.join(PARTS)} of a model, got "
            f"{' and '.join(names) or 'none'}; open each with open_model(model, component=...)"
        )
    one = found[0].source
    for other in (given.source for given in found[1:]):
        if (one.name, one.dtype, one.model.config.to_dict()) != (other.name, other.dtype, other.model.config.to_dict()):
            raise OptionError(
                f"compress_components takes components of one model in one dtype, got {one.name} in {dtype_name(one)} "
                f"and {other.name} in {dtype_name(other)}; open the same model for each"
            )
    return sorted(found, key=lambda given: PARTS.index(given.source.part.name))


def _given(component: object) -> _Component:
    """Return one component as it was given.

    Raises:
        OptionError: it is none.
    """
    match component:
        case (DenseModel() as source, (Method() | str()) as method, CalibrationData() as tokens):
            return _Component(source, as_method(method), tokens)
        case _:
            raise OptionError(
                "each of the components is an open model (open_model(model, component=...)), a method and calibration "
                f"data, got {str(component)[:60]!r}"
            )


def _check(given: _Component, mode: str, output: str | Path) -> None:
    """Raise what would stop the second component only after the first is done."""
    source, method, tokens = given
    check_request(method, tokens, None, mode, output)
    check_fits(tokens.ids, validated(source))
    check_by_shapes(source, method)


def _identity(components: list[_Component], mode: str) -> dict[str, Any]:
    """Return the identity of the last component, with that of the one before it in it, and so on."""
    *before, last = components
    mine = run_identity(*last, None, mode)
    return mine | ({"before": _identity(before, mode)} if before else {})


def _with_source(on_plan: OnPlan | None, source: DenseModel) -> Callable[[Plan], None] | None:
    return on_plan and (lambda plan: on_plan(plan, source))


def _opened_again(place: Path, asked: DenseModel) -> DenseModel:
    """Open the component asked for, in the model whose other component is compressed."""
    source = open_model(place, dtype=dtype_name(asked), device=str(asked.device), component=asked.part.name)
    source.name, source.revision, source.autocast = asked.name, asked.revision, asked.autocast
    source.offload = asked.offload
    source.processors.name = asked.name
    return source
