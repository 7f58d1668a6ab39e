"""`rankfold compress`"""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import OptionError
from . import common as c
from . import options as o


@o.expanded
def command(
    model: o.Model,
    *,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder to write; must not exist.")] = None,
    what: o.MethodOptions,
    text: o.CalibrationOptions,
    mode: Annotated[
        str, typer.Option(help="sequential, or one-pass (all blocks measured on the dense model).")
    ] = "sequential",
    moments: o.Moments = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    dtype: o.Written = "auto",
    device: o.Device = "auto",
    part: o.Part = None,
    json: o.Json = False,
) -> None:
    """Compress a model and write a checkpoint that transformers loads.

    \b
    rankfold compress HuggingFaceTB/SmolLM2-135M -o small --sparsity 0.3
    rankfold compress ./my-model -o small --calibration my-text.txt --modules mlp=0.4,vo=0.2
    rankfold compress ./my-model -o small --moments moments/ --sparsity 0.2
    rankfold compress ./my-model --sparsity 0.5 --dry-run

    A run that was interrupted continues when the same command is given again.
    """
    chosen = what.parse()
    if output is None and not dry_run:
        raise OptionError("-o/--output is missing: where to write the compressed model (or use --dry-run)")
    from .. import pipeline
    from ..calibration.store import MomentStore
    from ..checkpoint.source import open_model
    from ..files import check_output
    from ..planning import timed
    from ..proving import proved

    if output is not None and not dry_run:
        check_output(output)
    store = MomentStore.open(moments) if moments else None
    source = proved(open_model(model, dtype=dtype, device=device, part=part))
    chosen.supported_modules(source.architecture, source.meta_block(0))
    tokens = None if store else text.load(source)

    def with_time(plan):
        return timed(plan, source, tokens.describe(), mode) if tokens else plan

    if dry_run:
        from .plan import predicted, show

        measured = store or predicted(source, chosen, tokens)
        return show(with_time(pipeline.plan(source, chosen, measured, tokens)), None, json)

    def announce(plan) -> None:
        plan = with_time(plan)
        c.console().print(plan.table(), plan.summary())

    folder = pipeline.compress(source, chosen, tokens, output, moments=store, mode=mode, on_plan=announce)
    from ..files import read_json

    record = read_json(folder / "rankfold.json")
    result = {"output": str(folder), **record["counts"], "seconds": record["run"]["seconds"]["total"]}
    result["held_out"] = record["held_out"]

    def show_result(out) -> None:
        out.print(
            f"{folder}: {result['sparsity']:.2%} of the counted weights {c.gone(result)}, {result['parameters']:,} parameters, "
            f"{result['seconds']:.0f} s",
            soft_wrap=True,
        )
        if result["held_out"]:
            out.print(c.outcome(result["held_out"]), soft_wrap=True)

    c.emit(result, json, show_result)
