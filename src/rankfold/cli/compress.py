"""`rankfold compress`"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..report.outcomes import recovery_lines
from . import common as c
from . import options as o
from . import summary
from .calibration import CalibrationOptions
from .components import methods_of_components, opened_components
from .config import Run
from .plan import plan_components, predicted, show
from .recover import UNCHANGED, parse_minutes


@o.expanded
def command(
    model: o.Model,
    *,
    config: Run = None,
    component: o.Component = None,
    components: o.Components = None,
    revision: o.Revision = None,
    device: o.Device = "auto",
    what: o.MethodOptions,
    text: CalibrationOptions,
    moments: o.Moments = None,
    mode: Annotated[
        str, o.advanced(help="sequential, or one-pass: all blocks measured on the dense model.")
    ] = "sequential",
    output: Annotated[
        Path | None,
        o.of_output("-o", "--output", help="Folder to write; must not exist. Default: NAME-METHOD-SPARSITY."),
    ] = None,
    recover: Annotated[
        str | None,
        o.of_training(metavar="TIME", help="Then train it about this long, e.g. 15min; see `rankfold recover`."),
    ] = None,
    dry_run: Annotated[bool, o.of_output("--dry-run", help="Print the plan and stop.")] = False,
    dtype: o.Written = "auto",
    json: o.Json = False,
) -> None:
    """Compress a model into a checkpoint that transformers loads.

    \b
    rankfold compress HuggingFaceTB/SmolLM2-135M --sparsity 0.3
    rankfold compress ./my-model -o small --calibration my-text.txt
    rankfold compress ./my-model --sparsity 0.5 --dry-run
    rankfold compress ./my-model -o small --recover 15min
    rankfold compress --config small/rankfold.json -o other --sparsity 0.2

    The same command continues a run that was interrupted.
    """
    model, minutes = o.at_revision(model, revision), parse_minutes(recover)
    chosen = what.parse() if components is None else methods_of_components(components, what, config)
    from .. import pipeline
    from .._utils.files import check_output
    from ..calibration.store import MomentStore
    from ..compression.duration import timed
    from ..compression.validate_spec import validated
    from ..models.opening import open_model

    for method in [chosen] if components is None else chosen.values():
        pipeline.check_mode(method, mode, stored=moments is not None)
    if output is None:
        output = Path(_name(model, [chosen] if components is None else [*chosen.values()]))
    if not dry_run:
        check_output(output)
    if components is not None:
        opened = partial(opened_components, model, chosen, text, config, dtype, device)
        return plan_components(opened(), None, json, mode) if dry_run else _several(opened, output, mode, json)
    store = MomentStore.open(moments) if moments else None
    source = validated(open_model(model, dtype=dtype, device=device, component=component))
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

    how: dict = {"moments": store, "mode": mode, "on_plan": announce}
    if minutes is None:
        done = pipeline.compress(source, chosen, tokens, output, **how)
    else:
        from ..recovery.compressing import compress_and_recover

        done = compress_and_recover(source, chosen, tokens, output, minutes=minutes, **text.for_recovery(store), **how)
    folder, record = done.output, done.record
    stock = summary.exported_as_stock(folder, record)

    def finish(out) -> None:
        summary.show_result(str(folder), record, out)
        for line in recovery_lines(record.get("recovery")):
            out.print(f"  {line}", soft_wrap=True)
        if stock:
            summary.show_kept(stock["saving_kept"], stock["parameters"], "stock", folder, out)
        summary.show_next(folder, record, out, has_stock=stock is not None)

    c.emit({"output": str(folder), **c.result_of(record), **({"stock": stock} if stock else {})}, json, finish)
    if minutes is not None and not done.recovered:
        raise typer.Exit(UNCHANGED)


def _several(opened: Callable[[], list[tuple]], output: Path, mode: str, json: bool) -> None:
    """Compress each component with its own sparsity. No name is kept of what is opened: it goes when its turn is over."""
    from ..components import compress_components
    from ..compression.duration import timed
    from ..report.record import read_record, records_of

    def announce(plan, source) -> None:
        plan = timed(plan, source, plan.calibration, mode)
        c.console().print(plan.table(), plan.summary())

    compress_components(opened(), output, mode=mode, on_plan=announce)
    records = {record["plan"]["part"]: record for record in records_of(read_record(output))}

    def finish(out) -> None:
        for name, record in records.items():
            summary.show_result(f"{output}, {name}", record, out)
        summary.show_next(output, record, out, has_stock=False)

    results = {name: c.result_of(record) for name, record in records.items()}
    c.emit({"output": str(output), "components": results}, json, finish)


def _name(model: str, methods: list) -> str:
    """Return the default output: the names of model and method, and every sparsity."""
    place = Path(model).expanduser()
    name = place.resolve().name.removesuffix(".gguf") if place.exists() else place.name.partition("@")[0]
    sparsities = [value for method in methods for value in (method.own_sparsities or {"": method.sparsity}).values()]
    return "-".join([name, methods[0].name, *(f"{value:g}" for value in sparsities)])
