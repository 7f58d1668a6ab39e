"""Both parts of a model in one run: what sees first, so that what writes is fitted to what the smaller tower sends.

    dense model --- vision ---> OUT.partial/before/vision --- language ---> OUT.partial ---> OUT

Each part goes through the pipeline as it would alone. The run is known by what both were given, so that the same call goes on
wherever an earlier one was killed.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from .architectures import PARTS
from .budgets import choices
from .calibration.tokens import Tokens, check_fits
from .checkpoint.run import Run
from .checkpoint.source import Source, open_model
from .errors import OptionError
from .files import writing
from .methods import Method
from .pipeline import carry_out, checked, compress
from .planning import check
from .proving import proved
from .report.identity import dtype_name, run_identity
from .report.plan import Plan

__all__ = ["compress_parts"]


class _Given(NamedTuple):
    """One part, what to do to it, and what it is measured on."""

    source: Source
    method: Method
    tokens: Tokens


def compress_parts(
    parts: Iterable[tuple[Source, Method, Tokens]],
    output: str | Path,
    *,
    mode: str = "sequential",
    on_plan: Callable[[Plan, Source], None] | None = None,
) -> Path:
    """Compress the vision and the language part of a model, each in its own way.

    Args:
        parts: of each part the open model (``open_model(model, part="vision")``, ``part="language"``), what to do, and what to
            calibrate on. The vision part comes first, whatever their order.
        output: folder to write (resumable).
        mode: of both, see :func:`rankfold.compress`.
        on_plan: called with the plan of a part, and the model it is about, before any block of that part is compressed.

    Returns:
        The folder written. Its record is that of the language part, with that of the vision part under ``before``.

    Raises:
        OptionError: not these two parts of one model.
        OptionError, UnsupportedModelError, NumericsError, CheckpointError, DataError: as :func:`rankfold.compress`; what can be
            said of the language part beforehand is said before the vision part is compressed.
    """
    first, last = _both(parts)
    for given in (first, last):
        _check(given, mode, output)
    run = Run(output, _identity(last, mode) | {"before": _identity(first, mode)})
    with run.working():
        if run.complete:  # what an earlier process could not rename any more
            return run.publish()
        place = run.before / first.source.part.name
        if not place.exists():
            with writing(run.before):
                run.before.mkdir(exist_ok=True)
            compress(*first, place, mode=mode, on_plan=_telling(on_plan, first.source))
        del parts, first, given  # the tower's source holds all of the language model
        begin, source = time.perf_counter(), _opened_again(place, last.source)
        return carry_out(source, *last[1:], None, run.identity, run, _telling(on_plan, source), begin)


def _both(parts: Iterable[tuple[Source, Method, Tokens]]) -> list[_Given]:
    """In the order in which they are compressed."""
    found = [_Given(*given) for given in parts]
    names = [given.source.part.name for given in found]
    if sorted(names) != sorted(PARTS):
        raise OptionError(
            f"compress_parts takes the parts {' and '.join(PARTS)} of a model, got {' and '.join(names) or 'none'}; open each "
            "with open_model(model, part=...)"
        )
    one, other = (given.source for given in found)
    if (one.name, one.dtype, one.model.config.to_dict()) != (other.name, other.dtype, other.model.config.to_dict()):
        raise OptionError(
            f"compress_parts takes two parts of one model in one dtype, got {one.name} in {dtype_name(one)} and {other.name} "
            f"in {dtype_name(other)}; open the same model twice"
        )
    return sorted(found, key=lambda given: PARTS.index(given.source.part.name))


def _check(given: _Given, mode: str, output: str | Path) -> None:
    """Whatever would stop the second part only after the first is done."""
    source, method, tokens = given
    checked(method, tokens, None, mode, output)
    check_fits(tokens.ids, proved(source))
    if method.budget != "latency":  # which takes measuring
        check(choices(source, method), method)


def _identity(given: _Given, mode: str) -> dict:
    return run_identity(given.source, given.method, given.tokens.describe(), mode)


def _telling(on_plan: Callable[[Plan, Source], None] | None, source: Source) -> Callable[[Plan], None] | None:
    return on_plan and (lambda plan: on_plan(plan, source))


def _opened_again(place: Path, asked: Source) -> Source:
    """The part asked for, in the model whose other part is compressed."""
    source = open_model(place, dtype=dtype_name(asked), device=str(asked.device), part=asked.part.name)
    source.name, source.autocast = asked.name, asked.autocast
    return source
