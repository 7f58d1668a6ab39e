"""`rankfold plan`"""

from pathlib import Path
from typing import Annotated

import typer

from ..files import check_output, write_json
from . import common as c
from . import options as o


@o.expanded
def command(
    model: o.Model,
    what: o.MethodOptions,
    text: o.CalibrationOptions,
    moments: o.Moments = None,
    dtype: o.Written = "auto",
    device: o.Device = "auto",
    part: o.Part = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also save the plan as JSON.")] = None,
    json: o.Json = False,
) -> None:
    """Show what `compress` would do: ranks, errors, sizes, memory, time. Nothing is changed.

    \b
    rankfold plan ./my-model --sparsity 0.3 --moments moments
    rankfold plan ./my-model --sparsity 0.3 --calibration pydoc --samples 16 -o plan.json
    """
    chosen = what.parse()
    if output is not None:
        check_output(output, "name")
    from .. import pipeline
    from ..calibration.store import MomentStore
    from ..checkpoint.source import open_model
    from ..planning import timed

    source, tokens = open_model(model, dtype=dtype, device=device, part=part), None
    store = MomentStore.open(moments) if moments else None
    if store is None:
        tokens = text.load(source)
        store = predicted(source, chosen, tokens)
    the_plan = pipeline.plan(source, chosen, store, tokens)
    show(timed(the_plan, source, tokens.describe(), "sequential") if tokens else the_plan, output, json)


def predicted(source, method, tokens):
    """Moments that errors can be predicted from, for methods that take any."""
    from .. import pipeline
    from ..scores import needed

    if "one-pass" not in method.modes:
        return None
    return pipeline.calibrate(source, tokens, statistics=needed(source, method))


def show(plan, output: Path | None, as_json: bool) -> None:
    """Print a plan, and save it where asked."""
    if output is not None:
        write_json(output, plan.to_dict())
    c.emit(plan.to_dict(), as_json, lambda out: out.print(plan.table(), plan.summary()))
