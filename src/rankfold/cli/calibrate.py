"""`rankfold calibrate`"""

from pathlib import Path
from typing import Annotated

import typer

from . import common as c


def command(
    model: c.Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the moments.")],
    calibration: c.Calibration = "wikitext2",
    samples: c.Samples = 128,
    length: c.Length = 2048,
    seed: c.Seed = 0,
    field: c.Field = "text",
    dtype: c.Dtype = "auto",
    device: c.Device = "auto",
    json: c.Json = False,
) -> None:
    """Measure a model once, to compress it many times in seconds.

    \b
    rankfold calibrate ./my-model -o moments --calibration c4 --samples 64
    rankfold compress ./my-model -o small --moments moments --sparsity 0.2
    """
    from .. import pipeline
    from ..calibration.tokens import load_tokens
    from ..checkpoint.source import open_model

    source = open_model(model, dtype=dtype, device=device)
    tokens = load_tokens(calibration, source, samples=samples, length=length, seed=seed, field=field)
    store = pipeline.calibrate(source, tokens, output)
    c.emit(
        {"output": str(output), **store.identity},
        json,
        lambda out: out.print(f"{output}: moments of {len(source)} blocks"),
    )
