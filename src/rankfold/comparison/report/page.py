"""The report of a comparison: records, table, pictures, and one page that needs nothing but itself."""

import base64
import json
import re
import shlex
from pathlib import Path

import jinja2
import markupsafe

from ..._utils.files import write_text
from ..._utils.sizes import plural
from ..protocol import protocol_lines, read_protocol
from .layers import layer_pictures
from .plots import INKS, PAGE_WIDTH, DrawnPicture, Picture, drawn, result_pictures, write_pictures
from .table import NAMES, RATIO, RETENTION, cells_of_table, markdown, numbered, summary, tasks_of

RESULTS, TABLE, PLOTS, PAGE = "results.jsonl", "table.md", "plots", "report.html"
MEANING = {  # columns, or what is the same in all rows
    "sparsity": "fraction of the counted weights that was asked for",
    "removed": "fraction of the counted weights that is removed: linear weights of the blocks, or all with scope=model",
    "M parameters, MiB": "of the whole model, embeddings included, as it is written; tied matrices once",
    "KV bytes/token": "what a cache of keys and values, or of latents, takes per token, in the dtype that is written",
    "measured": "one-pass: on the dense model, with moments that all such rows share; sequential: every block on what "
    "the compressed blocks before it send, anew for this row",
    "compressing, s": "wall time of this row on this machine; of rows that share moments without measuring these",
    "kept": "share of the dense model's parameters",
    RETENTION: "mean of what is kept of the dense model: its perplexity over the row's on every text, the row's "
    "accuracy over its own in every mean of tasks that the protocol names",
}
ACCURACY = "share of questions answered right, ± its standard error: lm-eval's acc, or exact_match of written answers"

WRITTEN = {  # a definition -> the column that it is of
    "exact": "(exact)",
    "repetition": "repeated 4-grams",
    "distinct": "distinct 2-grams",
    "equal": "tokens as dense",
    "first_difference": "tokens until another",
}


def write_rows(folder: Path, config: dict, rows: list[dict]) -> None:
    """``results.jsonl`` and ``table.md``."""
    write_text(folder / RESULTS, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    write_text(folder / TABLE, markdown(rows) + "".join(f"\n{line}\n" for line in _protocol(config)))


def _protocol(config: dict) -> list[str]:
    described = config["identity"].get("protocol")
    return protocol_lines(described) if described else []


def write_report(folder: Path, config: dict, rows: list[dict]) -> None:
    """Everything that is made out of the rows of a comparison.

    Args:
        folder: where to; files of an earlier report are replaced.
        config: ``compare.json``.
        rows: the first one is the dense model.
    """
    write_rows(folder, config, rows)
    found = [drawn(picture) for picture in pictures(rows)]
    write_pictures(found, folder / PLOTS)
    write_text(folder / PAGE, page(config, rows, found, folder.resolve().name))


def pictures(rows: list[dict]) -> list[Picture]:
    """Return every picture that the rows give; the first row is the dense model."""
    return result_pictures(rows) + layer_pictures([row for row in rows if row["status"] == "done"][1:])


def page(config: dict, rows: list[dict], found: list[DrawnPicture], name: str) -> str:
    """The page as HTML; nothing in it is loaded from elsewhere, and whatever the records say is text."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"embedded": embedded, "breakable": breakable}
    cells = cells_of_table(rows)
    done = [row for row in rows if row["status"] == "done"]
    lines = list(zip(range(len(rows)), rows, cells.lines, strict=True))
    columns = range(len(cells.header))
    probes = [i for i in columns if cells.header[i].endswith(RATIO)]
    environments, groups = [], dict[str, list[DrawnPicture]]()
    for facts in ({**row["environment"], **row["versions"]} for row in done):
        environments += [] if facts in environments else [facts]
    for one in found:
        groups.setdefault(one.picture.group, []).append(one)
    return environment.get_template("page.html.j2").render(
        identity=config["identity"],
        command=f"rankfold compare --config {shlex.quote(f'{name}/compare.json')} -o {shlex.quote(f'{name}-again')}",
        cells=cells,
        lines=lines,
        shown=[i for i in columns if i not in probes],
        probes=[*(i for i in columns if cells.header[i] in NAMES), *probes] if probes else [],
        probed=[entry for entry in lines if any(entry[-1][i] for i in probes)],
        probe=RATIO,
        protocol=_protocol(config),
        summary=summary(rows),
        notes=numbered(cells.notes),
        done=done,
        failed=[row for row in rows if row["status"] == "failed"],
        groups=groups,
        wide=drawn(found[0].picture, PAGE_WIDTH) if "results" in groups else None,
        environments=environments,
        definitions=_definitions(config, rows[0], {*cells.header, *cells.alike}),
        inks=INKS,
    )


def embedded(svg: str) -> str:
    """A picture as the address of itself."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def breakable(text: str) -> markupsafe.Markup:
    """A label that may be broken between its options."""
    return markupsafe.Markup("<wbr>").join(re.split(r"(?<=[:,])", text))


def _definitions(config: dict, dense: dict, names: set[str]) -> dict[str, str]:
    """Return what every number of the page is.

    Args:
        config: ``compare.json``.
        dense: the row of the dense model.
        names: of columns, and of what all rows have alike.
    """
    measures, tasks, described = dense["measures"], tasks_of(dense), config["identity"].get("protocol")
    protocol = read_protocol(described["name"]) if described else None
    found = {key: text for key, text in MEANING.items() if names & {key, *key.split(", ")}}
    found["perplexity"] = measures["texts"][0]["definition"]
    if tasks:
        what = ACCURACY.replace("acc,", f"{protocol.metric}, acc where a task has none,") if protocol else ACCURACY
        counts = {task: measures["tasks"][task].get("samples") for task in tasks}
        found["accuracy"] = what + "".join(f"; {task}: {plural(n, 'question')}" for task, n in counts.items() if n)
    for name, of in protocol.means.items() if protocol else ():
        found |= {name: f"mean accuracy of those of {', '.join(of)} that were run"} if f"{name}, %" in names else {}
    for name, column in WRITTEN.items() if "generation" in measures else ():
        found[column] = measures["generation"]["definitions"][name]
    return found | ({"prefill, decode": measures["speed"]["definition"]} if "speed" in measures else {})
