"""Write docs/models.md, docs/methods.md and docs/commands.md out of the code and the records.

python scripts/pages.py
"""

import inspect
import json
import re
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

from rankfold.cli.app import app
from rankfold.cli.methods import ROLE, options_of
from rankfold.cli.models import rows_of_models
from rankfold.methods import METHODS, method_class
from rankfold.methods.registry import Entry

ROOT = Path(__file__).parents[1]
GRID = ROOT / "benchmarks" / "results" / "grid_smollm2.json"
MADE = "This page is made by `python scripts/pages.py`."

MODELS = f"""# Models

A model has one component or several; `--component` chooses one. The family of a component is the `model_type` of its
config. LLaVA, LLaVA-NeXT, Idefics 3 and SmolVLM take a language model of any family; the one that transformers makes by
default is shown.

- **mlp**: hidden units are removed, of every expert where there are experts.
- **qk**: rotary *pairs* of queries and keys are removed; *svd*: nothing rotates, so directions are; *dense*: \
they stay. With a
  norm over queries and keys, pairs are removed only *where named* (`--modules mlp,qk,vo`).
- **vo**: values and outputs are compressed jointly.
- Blocks without attention, with the linear attention of Qwen3-Next and Qwen3.5, the convolution of LFM2 or Mamba of
  Granite 4, Bamba and Jamba, lose hidden units only. So do those that have attention and Mamba beside each other
  (Falcon-H1).

The spec of any other family is derived from a block and checked numerically against the model before it is used;
otherwise one line says why not. `rankfold models MODEL` shows one model. To add a family, write [a page of
data](add-an-architecture.md). {MADE}

"""
# What a reader should know of a method before its options.
USE = {
    "rankfold": "Take it first: it loses least on SmolLM2, Qwen2.5-Coder, Gemma 3 and opt-6m. On the very small "
    "stories260K `modegpt` is better. "
    "[How it works](method.md).",
    "modegpt": "Take it where one calibration serves many compressions, or where its form in the paper is wanted "
    "([differences](papers.md#modegpt-arxiv240809632)). [How it works](concepts.md#what-is-compressed).",
    "latentllm": "Take it for a narrow cache of models without rotary embedding, or for factors of 4 or 8 bits. "
    "[How it works](latentllm.md).",
}
BASES = ("latentllm", "modegpt")  # whose options others have, with other defaults
METHODS_HEAD = f"""# Methods

Three methods are for use: `rankfold` (the default), `modegpt` and `latentllm`. The others are for
[comparison](baselines.md). Options that a method shares with all others are listed [once](#options-of-every-method);
those in the tables of the methods are given by `--set`, such as `--set ridge=0.01`. In Python, `--rank-multiple 16
--set ridge=0.01` is `rankfold.compress(..., rank_multiple=16, ridge=0.01)`. Perplexities are those of SmolLM2-135M on
excerpts of WikiText-2 and C4 after calibration on WikiText-2; the dense model has DENSE ([all
rows](results/grid.md)). {MADE}
"""
COMMANDS = f"""# Commands

`MODEL` is a hub id (`owner/name`, or `owner/name@revision`), a folder or a `.gguf` file. All commands take `--json`.
An error is one line on stderr. The exit code is 2 after an error, 1 where `compare` could not measure a model, 3 where
`recover` (or `compress --recover`) gained nothing, and 130 after Ctrl-C; a traceback is a bug. {MADE}

"""


def models() -> str:
    """Return the page of models."""
    return MODELS + table(rows_of_models())


def table(rows: list[dict[str, str]]) -> str:
    """Return a Markdown table, a column for each key."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def methods() -> str:
    """Return the page of methods: what each is, its options, its perplexity where a record has one."""
    measured = {row["name"]: row["perplexity"] for row in json.loads(GRID.read_text(encoding="utf-8"))["rows"]}
    shared = {row["option"] for row in options_of("svd")} & {row["option"] for row in options_of("rankfold")}
    shared = {option for option in shared if not option.startswith("--set")}
    every = [row for row in options_of("rankfold") if row["option"] in shared]
    head = METHODS_HEAD.replace("DENSE", numbers(measured["dense"]))
    sections = [section(name, entry, shared, measured) for name, entry in METHODS.items()]
    return "\n".join([head, *sections, "## Options of every method\n", code_cells(every)])


def section(name: str, entry: Entry, shared: set[str], measured: dict[str, dict[str, float]]) -> str:
    """Return what is written about one method."""
    about = inspect.cleandoc(method_class(name).__doc__ or "").partition("\n\n")[0]
    paper = f" [arXiv:{entry.paper}](https://arxiv.org/abs/{entry.paper})" if entry.paper else ""
    lines = [f"## {name}", "", f"{entry.summary}.{paper}", ""]
    if not about.startswith("Options"):  # which are in the table
        lines += [ROLE.sub(r"`\1`", " ".join(about.split())).replace("``", "`"), ""]
    found = {sparsity: measured.get(f"{name} {sparsity}") for sparsity in ("0.3", "0.5")}
    if any(found.values()):
        said = "; ".join(f"{numbers(value)} at sparsity {sparsity}" for sparsity, value in found.items() if value)
        lines += [f"Perplexity: {said}.", ""]
    if name in USE:
        lines += [USE[name], ""]
    return "\n".join([*lines, *own_options(name, shared)])


def own_options(name: str, shared: set[str]) -> list[str]:
    """Return what is written about the options of a method: a table, or how they differ from those of another."""
    own, written = defaults(name, shared), []
    base = next((base for base in BASES if name not in (*USE, base) and {*defaults(base, shared)} <= {*own}), None)
    if base:
        before = defaults(base, shared)
        changed = [f"`{key}={row['default']}`" for key, row in own.items() if key in before and row != before[key]]
        written = [
            f"Options of [`{base}`](#{base})" + (f", by default {', '.join(changed)}" if changed else "") + ".",
            "",
        ]
        own = {key: row for key, row in own.items() if key not in before}
    return [*written, code_cells([*own.values()])] if own else written


def defaults(name: str, shared: set[str]) -> dict[str, dict[str, str]]:
    """Return the options of a method that not all methods have, each with its row."""
    rows = (
        (row["option"].removeprefix("--set ").rstrip("="), row)
        for row in options_of(name)
        if row["option"] not in shared
    )
    return {option: row | {"option": option} for option, row in rows}


def numbers(perplexity: dict[str, float]) -> str:
    """Return the perplexities on WikiText-2 and C4."""
    return " and ".join(f"{value:,.1f}" if value < 1e4 else f"{value:.1e}" for value in perplexity.values())


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
    text = re.sub(r"\n{3,}", "\n\n", text[text.index("## ") :].replace("\b", ""))
    return COMMANDS + text.rstrip() + "\n"


PAGES = {"models": models, "methods": methods, "commands": commands}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / "docs" / f"{name}.md").write_text(page(), encoding="utf-8")
