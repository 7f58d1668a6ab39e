"""Write docs/models.md, docs/methods.md and docs/commands.md out of scripts/pages, the code and the records.

python scripts/pages.py
"""

import json
import re
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

from rankfold.cli.app import app
from rankfold.cli.methods import options_of
from rankfold.cli.models import rows_of_models
from rankfold.methods import METHODS
from rankfold.methods.registry import Entry

ROOT = Path(__file__).parents[1]
TEXTS = ROOT / "scripts" / "pages"  # what is written by hand; words in capitals on a line of their own are filled in
GRID = ROOT / "benchmarks" / "results" / "grid_smollm2.json"
MADE = "\n<!-- Made by `python scripts/pages.py`: edit scripts/pages and the code, not this file. -->\n"
USED = ("rankfold", "modegpt", "latentllm")  # the others are for comparison
BASES = ("latentllm", "modegpt")  # whose options others have, with other defaults


def filled(name: str, **parts: str) -> str:
    """Return a page: what is written by hand, with its parts out of the code and the records."""
    text = (TEXTS / f"{name}.md").read_text(encoding="utf-8")
    for word, part in parts.items():
        text = text.replace(word, part)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n" + MADE


def models() -> str:
    """Return the page of models."""
    return filled("models", TABLE=table(rows_of_models()))


def table(rows: list[dict[str, str]]) -> str:
    """Return a Markdown table, a column for each key."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def methods() -> str:
    """Return the page of methods: a table of all with their perplexities, and the options of each."""
    measured = {row["name"]: list(row["perplexity"].values()) for row in json.loads(GRID.read_text("utf-8"))["rows"]}
    shared = {row["option"] for row in options_of("svd")} & {row["option"] for row in options_of("rankfold")}
    shared = {option for option in shared if not option.startswith("--set")}
    every = [row for row in options_of("rankfold") if row["option"] in shared]
    options = {f"OPTIONS {name}\n": own_options(name, shared) for name in METHODS}
    dense = " and ".join(map(number, measured["dense"]))
    parts = {"DENSE": dense, "TABLE": choice(measured), **options, "OPTIONS all\n": code_cells(every)}
    return filled("methods", **parts)


def choice(measured: dict[str, list[float]]) -> str:
    """Return the table of all methods: those for use first, then the others by their perplexity."""
    found = {name: [measured.get(f"{name} {at}", []) for at in ("0.3", "0.5")] for name in METHODS}
    best = sorted(METHODS, key=lambda name: (name not in USED, *((not values, values) for values in found[name])))
    rows = [row(name, METHODS[name], found[name]) for name in best]
    heads = ("method", "what it does", "WikiText-2, 0.3", "C4, 0.3", "WikiText-2, 0.5", "C4, 0.5")
    return table([dict(zip(heads, cells, strict=True)) for cells in rows])


def row(name: str, entry: Entry, found: list[list[float]]) -> list[str]:
    """Return the cells of one method."""
    cells = [number(value) for values in found for value in values or (None, None)]
    return [f"[`{name}`](#{name.replace('+', '')})", entry.summary, *cells]


def own_options(name: str, shared: set[str]) -> str:
    """Return what is written about the options of a method: a table, or how they differ from those of another."""
    own, written = defaults(name, shared), ""
    base = next((base for base in BASES if name not in BASES and {*defaults(base, shared)} <= {*own}), None)
    if base:
        before = defaults(base, shared)
        changed = [f"`{key}={row['default']}`" for key, row in own.items() if key in before and row != before[key]]
        written = f"Options of [`{base}`](#{base})" + (f", by default {', '.join(changed)}" if changed else "")
        own = {key: row for key, row in own.items() if key not in before}
        written += ", and:\n\n" if own else ".\n"
    return written + (code_cells([*own.values()]) if own else "")


def defaults(name: str, shared: set[str]) -> dict[str, dict[str, str]]:
    """Return the options of a method that not all methods have, each with its row."""
    rows = (
        (row["option"].removeprefix("--set ").rstrip("="), row)
        for row in options_of(name)
        if row["option"] not in shared
    )
    return {option: row | {"option": option} for option, row in rows}


def number(perplexity: float | None) -> str:
    """Return a perplexity as it is written in the table."""
    if perplexity is None:
        return "–"
    return f"{perplexity:.1e}" if perplexity > 1e5 else f"{perplexity:,.{2 if perplexity < 1e3 else 0}f}"


def code_cells(rows: list[dict[str, str]]) -> str:
    """Return a table whose options, types and defaults are code."""
    code = ("option", "type", "default")
    plain = [{key: value.replace(" | ", ", ") for key, value in row.items()} for row in rows]
    return table([{k: f"`{v}`" if k in code and v else v for k, v in row.items()} for row in plain])


def commands() -> str:
    """Return the page of commands."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="rankfold")
    text = re.sub(r"(?:^rankfold .*\n)+", lambda found: f"```bash\n{found[0]}```\n", text, flags=re.M)  # examples
    return filled("commands", COMMANDS=text[text.index("## ") :].replace("\b", ""))


PAGES = {"models": models, "methods": methods, "commands": commands}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / "docs" / f"{name}.md").write_text(page(), encoding="utf-8")
