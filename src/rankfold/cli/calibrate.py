"""`rankfold calibrate`"""

from pathlib import Path
from typing import Annotated

from .._utils.sizes import plural
from . import common as c
from . import options as o
from .calibration import CalibrationOptions


@o.expanded
def command(
    model: o.Model,
    *,
    component: o.Component = None,
    revision: o.Revision = None,
    device: o.Device = "auto",
    offload: o.Offload = None,
    text: CalibrationOptions,
    output: Annotated[Path, o.of_output("-o", "--output", help="Folder for the moments.")],
    dtype: o.Written = "auto",
    json: o.Json = False,
) -> None:
    """Measure a model once, to compress it many times in seconds.

    \b
    rankfold calibrate ./my-model -o moments --calibration c4 --num-samples 64
    rankfold compress ./my-model -o small --method modegpt --moments moments --sparsity 0.2
    """
    model = o.at_revision(model, revision)
    from .. import pipeline
    from .._utils.stopwatch import timed_run
    from ..models.opening import open_model

    source = open_model(model, dtype=dtype, device=device, component=component, offload=offload)
    tokens = text.load(source)
    with timed_run() as stopwatch:
        store = pipeline.calibrate(source, tokens, output)
    parts = stopwatch.seconds()
    total = parts.pop("total")
    c.emit(
        {"output": str(output), "seconds": total, "seconds_by_part": parts, **store.identity},
        json,
        lambda out: out.print(
            f"{output}: moments of {plural(len(source), 'block')}", c.where_time_went(total, parts), sep="\n"
        ),
    )
