"""`rankfold compare`"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from .._utils.extras import require
from ..errors import DataError
from ..report.outcomes import kind_rows
from . import common as c
from . import options as o
from .calibration import CalibrationOptions
from .config import Comparison, ProtocolName
from .rules import MayBePath


@o.expanded
def command(
    model: o.Model,
    *,
    config: Comparison = None,
    protocol: ProtocolName = None,
    revision: o.Revision = None,
    device: o.Device = "auto",
    offload: o.Offload = None,
    methods: Annotated[
        str,
        o.of_method(
            help="rankfold,modegpt,svd-llm; with options: modegpt:selection=leverage,gqa=paper (+: comma in a value)."
        ),
    ],
    sparsities: Annotated[str, o.of_method(help="Fractions of the weights to remove, e.g. 0.1,0.3,0.5.")],
    samples: CalibrationOptions,
    text: Annotated[
        list[str],
        o.of_measurements(
            metavar="TEXT", help="Text to compute perplexity on, named as for --calibration. Repeatable."
        ),
        MayBePath(),
    ],
    text_length: Annotated[int, o.of_measurements(help="Tokens per sample of the texts.")] = 2048,
    tasks: Annotated[
        str | None, o.of_measurements(help="Tasks of lm-eval, e.g. arc_easy,piqa,mmlu_math:5 (5 examples).")
    ] = None,
    include_path: o.IncludePath = None,
    limit: o.Limit = None,
    generation: o.Generation = False,
    speed: Annotated[
        bool, o.of_measurements("--speed", help="Tokens per second, in turn with the dense model.")
    ] = False,
    output: Annotated[Path, o.of_output("-o", "--output", help="Folder of the comparison.")],
    keep: Annotated[bool, o.of_output("--keep", help="Keep the compressed models and the moments.")] = False,
    dtype: o.Written = "auto",
    json: o.Json = False,
) -> None:
    """Run methods at several sparsities and report on them.

    The report is a table, plots, and a page to read in a browser.

    \b
    rankfold compare ./my-model --methods rankfold,modegpt,latentllm --sparsities 0.1,0.3 --text wikitext2 -o report
    rankfold compare ./my-model --methods modegpt,modegpt:mode=sequential --sparsities 0.3 --text a.txt --speed -o speed

    rankfold compare ./my-model --protocol lowrankarena --include-path rows -o report

    The same command continues where it was; further methods and sparsities can be added to the folder. A row that
    cannot be done has the reason, and the exit code is 1. docs/compare.md has more,
    such as the option mode of a method.
    """
    model = o.at_revision(model, revision)
    from ..comparison import cells_of
    from ..comparison.protocol import Rules, read_protocol
    from .forms import parse_forms, parse_sparsities

    rules, cells = read_protocol(protocol) if protocol else None, {}
    for run in config or [{}]:
        forms, fractions = parse_forms(run.get("methods", methods)), parse_sparsities(run.get("sparsities", sparsities))
        if rules:
            rules.check(fractions, [form.options for form in forms])
        common = {"scope": "model"} if rules else None
        cells |= {cell.key: cell for cell in cells_of(forms, fractions, common)}
    for module in ("matplotlib", "jinja2"):
        require(module, "the report")
    from ..checkpoint.load import load_model
    from ..comparison import Accuracies, Generations, Measures, Perplexities, Speed, compare
    from ..comparison.measures import Measure
    from ..evaluation.tasks import Questions
    from ..evaluation.text import Texts
    from ..evaluation.writing import Writing
    from ..models.auto_classes import check_writes
    from ..models.devices import say_if_slow
    from ..models.opening import open_model
    from ..report.identity import dtype_name

    source = open_model(model, dtype=dtype, device=device, offload=offload)
    check_writes(source.model.config, source.name)
    if dtype == "auto":
        say_if_slow(source.dtype, source.device)
    try:
        most = rules.texts if rules else {}
        texts = Perplexities(source, Texts(text, text_length, limit, samples.text_column, most))
    except DataError as error:  # --max-length is of the calibration here
        raise DataError(str(error).replace("--max-length", "--text-length")) from error
    measured: dict[str, Measure] = {"texts": texts}
    left_out: dict[str, str] = {}
    if tasks is not None:
        questions = Questions([name.strip() for name in tasks.split(",")], include_path, limit)
        if rules:
            left_out = questions.left_out()
            questions = replace(questions, tasks=[task for task in questions.tasks if task not in left_out])
        if questions.tasks:
            measured["tasks"] = Accuracies(source, questions)
    if generation:
        measured["generation"] = Generations(source, Writing(include_path, limit or Writing.limit))
    if speed:
        measured["speed"] = Speed(source.context_length)
    measures = Measures(measured, lambda: load_model(model, dtype=dtype_name(source), device=str(source.device)))
    rows = compare(
        source,
        [*cells.values()],
        samples.load(source),
        measures,
        output,
        keep=keep,
        rules=Rules(rules, left_out) if rules else None,
        on_row=lambda row: _say(row),
    )
    failed = [row for row in rows if row["status"] == "failed"]
    c.emit({"output": str(output), "failed": len(failed), "rows": rows}, json, lambda out: _show(output, rows, out))
    if failed:
        raise typer.Exit(1)


def _say(row: dict[str, Any]) -> None:
    found = row["error"] or ", ".join(
        f"perplexity {text['perplexity']:.2f} on {text['text']}" for text in row["measures"]["texts"]
    )
    probes = row["probe_texts"] or {}
    lines = [found, *(f"{kind}: perplexity {a} -> {b}, {remark}" for kind, a, b, remark in kind_rows(probes))]
    lines += [f"probe texts: not measured ({probes['skipped']})"] if probes.get("skipped") else []
    for line in lines:
        c.console().print(f"{row['label']} at {row['sparsity']}: {line}")


def _show(output: Path, rows: list[dict], out) -> None:
    from ..comparison.folder import CONFIG, read_config
    from ..comparison.protocol import protocol_lines
    from ..comparison.report.table import tables

    out.print(*tables(rows, out.width))
    described = read_config(output / CONFIG)["identity"].get("protocol")
    for line in protocol_lines(described) if described else []:
        out.print(line, soft_wrap=True)
    out.print(f"{output}: report.html, table.md, results.jsonl, plots")
