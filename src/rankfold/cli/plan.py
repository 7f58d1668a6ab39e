"""`rankfold plan`"""

from pathlib import Path
from typing import Annotated

import typer

from ..files import check_output, write_json
from . import common as c


def command(
    model: c.Model,
    sparsity: c.Sparsity = 0.3,
    method: c.MethodName = "modegpt",
    calibration: c.Calibration = "wikitext2",
    samples: c.Samples = 128,
    length: c.Length = 2048,
    seed: c.Seed = 0,
    field: c.Field = "text",
    of: c.Of = "blocks",
    modules: c.Modules = None,
    allocation: c.Allocation = "uniform",
    epsilon: c.Epsilon = None,
    multiple: c.Multiple = 8,
    protect: c.Protect = "",
    option: c.Option = None,
    moments: c.Moments = None,
    dtype: c.Dtype = "auto",
    device: c.Device = "auto",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also save the plan as JSON.")] = None,
    json: c.Json = False,
) -> None:
    """Show what `compress` would do: ranks, errors, sizes, memory, time. Nothing is changed.

    \b
    rankfold plan ./my-model --sparsity 0.3 --moments moments
    rankfold plan ./my-model --sparsity 0.3 --calibration pydoc --samples 16 -o plan.json
    """
    chosen = c.parse_method(method, sparsity, of, modules, allocation, epsilon, multiple, protect, option)
    if output is not None:
        check_output(output, "name")
    from .. import pipeline
    from ..calibration.store import MomentStore
    from ..calibration.tokens import load_tokens
    from ..checkpoint.source import open_model

    store = MomentStore.open(moments) if moments else None
    source = open_model(model, dtype=dtype, device=device)
    if store is None:
        tokens = load_tokens(calibration, source, samples=samples, length=length, seed=seed, field=field)
        store = pipeline.calibrate(source, tokens, statistics=pipeline.needed(source, chosen))
    show(pipeline.plan(source, chosen, store), output, json)


def show(plan, output: Path | None, as_json: bool) -> None:
    """Print a plan, and save it where asked."""
    if output is not None:
        write_json(output, plan.to_dict())
    c.emit(plan.to_dict(), as_json, lambda out: out.print(plan.table(), plan.summary()))
