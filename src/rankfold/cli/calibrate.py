"""`rankfold calibrate`"""

from pathlib import Path
from typing import Annotated

import typer

from . import common as c
from . import options as o
from .calibration import CalibrationOptions


@o.expanded
def command(
    model: o.Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the moments.")],
    text: CalibrationOptions,
    dtype: o.Written = "auto",
    device: o.Device = "auto",
    part: o.Part = None,
    revision: o.Revision = None,
    json: o.Json = False,
) -> None:
    """Measure a model once, to compress it many times in seconds.

    \b
    rankfold calibrate ./my-model -o moments --calibration c4 --samples 64
    rankfold compress ./my-model -o small --method modegpt --moments moments --sparsity 0.2
    """
    model = o.at_revision(model, revision)
    from .. import pipeline
    from ..checkpoint.source import open_model

    source = open_model(model, dtype=dtype, device=device, part=part)
    store = pipeline.calibrate(source, text.load(source), output)
    c.emit(
        {"output": str(output), **store.identity},
        json,
        lambda out: out.print(f"{output}: moments of {len(source)} blocks"),
    )
