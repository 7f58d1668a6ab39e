"""The table of a comparison: one row a method and sparsity."""

import io

from rich import box
from rich.console import Console
from rich.table import Table

from ...report.outcomes import kinds_in, ratio_text, warnings_of

RATIO = " (probe), × dense"  # how the column of a kind of probe text ends
LEFT_OUT = ("removed", "MiB", "KV bytes/token", "measured", "compressing, s")  # of the table in a terminal


def cells_of_table(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table, as text, of the rows of a comparison; the first one is the dense model."""
    done = [row for row in rows if row["measures"]]
    texts = [text["text"] for text in done[0]["measures"]["texts"]]
    tasks = list(done[0]["measures"].get("tasks", {}))
    speed = "speed" in done[0]["measures"]
    header = ["method", "sparsity", *(f"perplexity {text}" for text in texts), *(f"{task}, %" for task in tasks)]
    header += ["prefill, × dense", "decode, × dense"] if speed else []
    kinds = list(dict.fromkeys(kind for row in done for kind in kinds_in(row.get("probe_texts"))))
    header += [f"{kind}{RATIO}" for kind in kinds]
    header += ["removed", "M parameters", "MiB", "KV bytes/token", "measured", "compressing, s", "note"]
    lines = [_cells(row, len(texts), tasks, speed, kinds) for row in rows]
    return (header, lines) if any(line[-1] for line in lines) else (header[:-1], [line[:-1] for line in lines])


def _cells(row: dict, texts: int, tasks: list[str], speed: bool, kinds: list[str]) -> list[str]:
    asked = f"{row['sparsity']:g}"
    if row["status"] == "failed":
        empty = [""] * (4 + texts + len(tasks) + 2 * speed + len(kinds))
        return [row["label"], asked, *empty, row["mode"], "", f"failed: {row['error']}"]
    counts, measures = row["counts"], row["measures"]
    sizes = [f"{counts['sparsity']:.2%}", f"{counts['parameters'] / 1e6:,.2f}", f"{counts['bytes'] / 2**20:,.1f}"]
    sizes += [f"{counts['kv_bytes_per_token']:,}"]
    found = [f"{text['perplexity']:,.2f}" for text in measures["texts"]]
    found += [accuracy(measures["tasks"][task]) for task in tasks]
    found += [f"{measures['speed'][f'{kind}_ratio']:.2f}" for kind in ("prefill", "decode")] if speed else []
    ratios = kinds_in(row.get("probe_texts"))
    found += [ratio_text(ratios[kind]) if kind in ratios else "" for kind in kinds]
    seconds = "" if row["compress_seconds"] is None else f"{row['compress_seconds']:,.1f}"
    notes = [*warnings_of(row), *(["what is removed stays as zeros"] if "zeros" in counts else [])]
    return [row["label"], asked, *found, *sizes, row["mode"] or "", seconds, "; ".join(notes)]


def accuracy(task: dict) -> str:
    """Accuracy in per cent with its standard error; nothing where a task has none."""
    if task.get("acc") is None:
        return ""
    error = task.get("acc_stderr")
    return f"{100 * task['acc']:.1f}" + (f" ± {100 * error:.1f}" if error is not None else "")


def table(rows: list[dict]) -> Table:
    """What of it a terminal has room for."""
    header, lines = cells_of_table(rows)
    shown = [i for i, name in enumerate(header) if name not in LEFT_OUT and not name.endswith(RATIO)]
    wanted = [i for i in shown if any(line[i] for line in lines)]
    return _table([header[i] for i in wanted], [[line[i] for i in wanted] for line in lines], box.HEAVY_HEAD)


def _table(header: list[str], lines: list[list[str]], style: box.Box) -> Table:
    found = Table(box=style)
    for i, name in enumerate(header):
        text = name in ("method", "measured", "note")
        width = 10 if text else max(len(line[i]) for line in lines)  # numbers stay in one piece
        found.add_column(name, justify="left" if text else "right", overflow="fold", min_width=width)
    for line in lines:
        found.add_row(*line)
    return found


def markdown(rows: list[dict]) -> str:
    """The table in Markdown; what is in the cells cannot end them."""
    escaped = [_escape(row) for row in rows]
    file = io.StringIO()
    console = Console(file=file, width=100_000, highlight=False, markup=False, emoji=False, color_system=None)
    console.print(_table(*cells_of_table(escaped), box.MARKDOWN))
    lines = [line.strip() for line in file.getvalue().splitlines()]
    return "\n".join(line for line in lines if line) + "\n"


def _escape(value):
    """Every text of a record safe inside a Markdown table."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    if not isinstance(value, str):
        return value
    for character in "\\|<>[]*_`":
        value = value.replace(character, f"\\{character}")
    return " ".join(value.split())
