"""`rankfold compress`"""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import OptionError
from . import common as c
from . import options as o
from .calibration import CalibrationOptions
from .parts import methods_of_parts, opened_parts, show_parts
from .plan import plan_parts, predicted, show
from .saving import exported_as_stock, show_kept


@o.expanded
def command(
    model: o.Model,
    *,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder to write; must not exist.")] = None,
    what: o.MethodOptions,
    text: CalibrationOptions,
    mode: Annotated[
        str, typer.Option(help="sequential, or one-pass (all blocks measured on the dense model).")
    ] = "sequential",
    moments: o.Moments = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    dtype: o.Written = "auto",
    device: o.Device = "auto",
    part: o.Part = None,
    parts: o.Parts = None,
    revision: o.Revision = None,
    json: o.Json = False,
) -> None:
    """Compress a model and write a checkpoint that transformers loads.

    \b
    rankfold compress HuggingFaceTB/SmolLM2-135M -o small --sparsity 0.3
    rankfold compress ./my-model -o small --calibration my-text.txt --modules mlp=0.4,vo=0.2
    rankfold compress ./my-model -o small --method modegpt --moments moments/ --sparsity 0.2
    rankfold compress ./my-model --sparsity 0.5 --dry-run
    rankfold compress ./sees-images -o small --parts language=0.3,vision=0.2 --calibration pairs.jsonl

    A run that was interrupted continues when the same command is given again.
    """
    model = o.at_revision(model, revision)
    chosen = what.parse() if parts is None else methods_of_parts(parts, what)
    if output is None and not dry_run:
        raise OptionError("-o/--output is missing: where to write the compressed model (or use --dry-run)")
    from .. import pipeline
    from .._utils.files import check_output
    from ..calibration.store import MomentStore
    from ..compression.duration import timed
    from ..compression.validate_spec import validated
    from ..models.opening import open_model

    for method in [chosen] if parts is None else chosen.values():
        pipeline.check_mode(method, mode, stored=moments is not None)
    if output is not None and not dry_run:
        check_output(output)
    if parts is not None:
        return _both(model, chosen, text, None if dry_run else output, mode, dtype, device, json)
    store = MomentStore.open(moments) if moments else None
    source = validated(open_model(model, dtype=dtype, device=device, component=part))
    chosen.supported_modules(source.architecture, source.meta_block(0))
    tokens = None if store else text.load(source)

    def with_time(plan):
        return timed(plan, source, tokens.describe(), mode) if tokens else plan

    if dry_run:
        measured = store or predicted(source, chosen, tokens)
        return show([with_time(pipeline.plan(source, chosen, tokens, moments=measured))], None, json)

    def announce(plan) -> None:
        plan = with_time(plan)
        c.console().print(plan.table(), plan.summary())

    done = pipeline.compress(source, chosen, tokens, output, moments=store, mode=mode, on_plan=announce)
    folder, record = done.output, done.record
    result = c.result_of(record)
    stock = exported_as_stock(folder, record)
    result |= {"stock": stock} if stock else {}

    def finish(out) -> None:
        c.show_result(str(folder), result, out)
        if stock:
            show_kept(stock["saving_kept"], stock["parameters"], "stock", folder, out)

    c.emit({"output": str(folder), **result}, json, finish)


def _both(model, methods, text, output: Path | None, mode: str, dtype: str, device: str, json: bool) -> None:
    """Each part with its own sparsity; without an output, the plans."""
    from ..components import compress_components
    from ..compression.duration import timed

    if output is None:
        return plan_parts(opened_parts(model, methods, text, dtype, device), None, json, mode)

    def announce(plan, source) -> None:
        plan = timed(plan, source, plan.calibration, mode)
        c.console().print(plan.table(), plan.summary())

    # No name is kept of what is opened: it goes when its part is done.
    compress_components(opened_parts(model, methods, text, dtype, device), output, mode=mode, on_plan=announce)
    show_parts(output, json)
