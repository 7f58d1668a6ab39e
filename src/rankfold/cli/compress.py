"""`rankfold compress`"""

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._utils.processes import from_first, is_first, on_first
from ..report.outcomes import recovery_lines
from . import common as c
from . import options as o
from . import summary
from .recover import UNCHANGED, parse_minutes
from .request import Request, show_plans

if TYPE_CHECKING:
    from rich.console import Console

    from ..methods import Method
    from ..models.dense_model import DenseModel
    from ..report.plan import Plan


log = logging.getLogger(__name__)


@o.expanded
def command(
    request: Request,
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
    json: o.Json = False,
) -> None:
    """Compress a model into a checkpoint that transformers loads.

    \b
    rankfold compress HuggingFaceTB/SmolLM2-135M --sparsity 0.3
    rankfold compress ./my-model -o small --calibration my-text.txt
    rankfold compress ./my-model --sparsity 0.5 --dry-run
    rankfold compress ./my-model --target-size 400MB
    rankfold compress ./my-model --keep-quality 0.95
    rankfold compress ./my-model -o small --recover 15min
    rankfold compress --config small/rankfold.json -o other --sparsity 0.2

    The same command continues a run that was interrupted.
    """
    methods, minutes = request.methods(), parse_minutes(recover)
    from .. import pipeline
    from .._utils.files import check_output
    from ..components import compress_components
    from ..compression.duration import timed
    from ..report.record import read_record, records_of

    for method in methods.values():
        pipeline.check_mode(method, mode, stored=request.moments is not None)
    if dry_run:
        return on_first(lambda: show_plans(request.plans(methods, mode), None, json))
    output = output or Path(_name(request, [*methods.values()]))
    check_output(output)
    store = request.stored()

    def announce(plan: "Plan", source: "DenseModel") -> None:
        if plan.calibration is not None and store is None:
            plan = timed(plan, source, plan.calibration, mode)
        c.console().print(plan.table(), plan.summary())

    def show(line: str) -> None:
        if is_first():
            c.console().print(line, soft_wrap=True)

    if len(methods) > 1:  # no name is kept of what is opened: it goes when its turn is over
        loaded = ((source, method, text.load(source)) for source, method, text in request.open(methods))
        compress_components(loaded, output, mode=mode, on_plan=announce)
    else:
        [(source, method, text)] = request.open(methods)
        tokens = None if store else text.load(source)
        how: dict[str, Any] = {"moments": store, "mode": mode, "on_plan": partial(announce, source=source)}
        goal = request.goal()
        if request.keep_quality is not None:
            from ..quality import compress_to_keep

            compress_to_keep(source, method, request.keep_quality, tokens, output, **how, on_run=show)
        elif minutes is None:
            pipeline.compress(source, method, tokens, output, **how, goal=goal)
        else:
            from ..recovery.compressing import compress_and_recover

            training = text.for_recovery(store)
            compress_and_recover(source, method, tokens, output, minutes=minutes, goal=goal, **training, **how)
    records = from_first(lambda: records_of(read_record(output)))
    for settings, record in zip(request.config or (), records, strict=False):
        _compare(settings.get("recorded", {}), record)
    stock = on_first(lambda: summary.exported_as_stock(output, records[-1]))

    def finish(out: "Console") -> None:
        for record in records:
            what = f"{output}, {record['plan']['part']}" if len(records) > 1 else str(output)
            summary.show_result(what, record, out)
        for line in recovery_lines(records[-1]):
            out.print(f"  {line}", soft_wrap=True)
        engine = summary.engine_of(output, records[-1])
        if stock and engine is None:
            summary.show_kept(stock["saving_kept"], stock["parameters"], "stock", output, out)
        summary.show_next(output, records[-1], out, engine=engine, has_stock=stock is not None)

    if len(records) > 1:
        result = {"components": {record["plan"]["part"]: c.result_of(record) for record in records}}
    else:
        result = c.result_of(records[0]) | ({"stock": stock} if stock else {})
    c.emit({"output": str(output), **result}, json, finish)
    if minutes is not None and not records[-1]["recovery"]["recovered"]:
        raise typer.Exit(UNCHANGED)


def _compare(recorded: dict[str, str | None], record: dict[str, Any]) -> None:
    """Warn where what a record was to repeat is of another model, or of other samples, as names are all it has."""
    if recorded.get("fingerprint") not in (None, record["fingerprint"]):
        log.warning("the model is not the one of --config: its weights are others")
    if recorded.get("sha256") not in (None, record["calibration"].get("sha256")):
        log.warning("the calibration samples are not those of --config: the text, or what tokenised it, is another one")


def _name(request: Request, methods: "list[Method]") -> str:
    """Return the default output: the names of model and method, and every sparsity or what was asked in its place."""
    from .._utils.files import own_name

    model = o.at_revision(request.model, request.revision)
    place = Path(model).expanduser()
    name = own_name(place).removesuffix(".gguf") if place.exists() else place.name.partition("@")[0]
    sparsities = [value for method in methods for value in (method.own_sparsities or {"": method.sparsity}).values()]
    amounts = [f"{value:g}" for value in sparsities]
    if request.target_size is not None:
        amounts = ["".join(request.target_size.split()).replace(":", "-")]
    if request.keep_quality is not None:
        amounts = [f"keep-{request.keep_quality:g}"]
    return "-".join([name, methods[0].name, *amounts])
