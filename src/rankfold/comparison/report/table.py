"""The table of a comparison: one row a method and sparsity."""

import io
import statistics
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...report.outcomes import kinds_in, marked_warnings, ratio_text

RATIO = " (probe), × dense"  # how the column of a kind of probe text ends
RETENTION = "Q. Ret."  # of a protocol
LEFT_OUT = ("removed", "MiB", "KV bytes/token", "measured", "compressing, s")  # of the table in a terminal
ALIKE = ("removed", "M parameters", "MiB", "KV bytes/token", "measured")  # stand once where all rows have the same
NAMES = ("method", "sparsity")
TEXTS = ("method", "measured", "note")  # columns of words
FOLDED, AROUND = 20, 3  # characters from which on words are folded, and around every cell
COMMON = "{} is the calibration text too; its perplexities are too good"
ZEROS = ("zeros", "what is removed stays as zeros")


@dataclass(frozen=True)
class Cells:
    """The table as text.

    Attributes:
        header, lines: names of columns, and a cell for each in every row.
        notes: sentences that cells of the column `note` refer to by number, from 1.
        alike: columns left out because all rows have one value, and that value.
        best: (line, column) of the best value of each sparsity.
    """

    header: list[str]
    lines: list[list[str]]
    notes: list[str] = field(default_factory=list)
    alike: dict[str, str] = field(default_factory=dict)
    best: set[tuple[int, int]] = field(default_factory=set)


def cells_of_table(rows: list[dict]) -> Cells:
    """Return the table of the rows of a comparison; the first one is the dense model."""
    notes: list[str] = []
    columns = [_cells(row, rows[0], notes) for row in rows]
    header = sorted(dict.fromkeys(name for found in columns for name in found), key=_place)
    lines = [[found.get(name, "") for name in header] for found in columns]
    alike = {}
    for name in [name for name in header if name in ALIKE]:
        values = {found[name] for found in columns if found.get(name)}
        if len(values) == 1:
            alike[name] = values.pop()
    kept = [i for i, name in enumerate(header) if name not in alike and any(line[i] for line in lines)]
    header, lines = [header[i] for i in kept], [[line[i] for i in kept] for line in lines]
    return Cells(header, lines, notes, alike, _best(rows, header))


def _place(name: str) -> int:
    """Return where a column stands: names, perplexities, notes, other measures, then sizes."""
    if name in (*NAMES, "kept", RETENTION) or name.startswith("perplexity "):
        return 0
    return 1 if name == "note" else 3 if name in (*ALIKE, "compressing, s") else 2


def _cells(row: dict, dense: dict, notes: list[str]) -> dict[str, str]:
    """Return column -> cell of one row; its sentences are added to the notes."""
    found = {"method": row["label"], "sparsity": f"{row['sparsity']:g}"}
    if row["status"] == "failed":
        return found | {"measured": row["mode"] or "", "note": _note(notes, "failed", f"failed: {row['error']}")}
    counts, measures = row["counts"], row["measures"]
    for text, before in zip(measures["texts"], dense["measures"]["texts"], strict=True):
        over = "" if row is dense else f" (× {_short(text['perplexity'] / before['perplexity'], '.2f')})"
        found[f"perplexity {text['text']}"] = f"{_short(text['perplexity'])}{over}"
    judged = row.get("protocol")
    found |= {f"{task}, %": accuracy(facts) for task, facts in tasks_of(row).items()}
    if judged:
        found |= {f"{name}, %": f"{100 * mean:.1f}" for name, mean in judged["means"].items()}
        found |= {"kept": f"{judged['kept']:.1%}", RETENTION: f"{judged['retention']:.3f}"}
    found |= _of_generation(measures.get("generation"))
    if "speed" in measures:
        found |= {f"{kind}, × dense": f"{measures['speed'][f'{kind}_ratio']:.2f}" for kind in ("prefill", "decode")}
    found |= {f"{kind}{RATIO}": ratio_text(facts) for kind, facts in kinds_in(row.get("probe_texts")).items()}
    seconds = row["compress_seconds"]
    # A text that the dense model guesses is named in its row: the others have the same text, and their ratio to it.
    marks = [("removes more", row["excess"])] if row.get("excess") else []
    marks += [
        *marked_warnings(row if row is dense else row | {"measures": {}}),
        *([ZEROS] if "zeros" in counts else []),
    ]
    marks += [("calibrated on it", COMMON.format(text)) for text in row.get("common_texts", [])]
    return found | {
        "removed": "" if row is dense else f"{counts['sparsity']:.2%}",
        "M parameters": f"{counts['parameters'] / 1e6:,.2f}",
        "MiB": f"{counts['bytes'] / 2**20:,.1f}",
        "KV bytes/token": f"{counts['kv_bytes_per_token']:,}",
        "measured": row["mode"] or "",
        "compressing, s": "" if seconds is None else f"{seconds:,.1f}",
        "note": ", ".join(_note(notes, mark, sentence) for mark, sentence in marks),
    }


def _short(value: float, form: str = ",.2f") -> str:
    """Return a number with two decimals, or as a power of ten where that would fill the table with digits."""
    return f"{value:{form}}" if value < 1e9 else f"{value:.2e}"


def _of_generation(generation: dict | None) -> dict[str, str]:
    """Return column -> cell of what a model writes."""
    if generation is None:
        return {}
    found = {f"{kind} (exact), %": f"{100 * facts['share']:.1f}" for kind, facts in generation["exact"].items()}
    shares = {"repeated 4-grams, %": "repetition", "distinct 2-grams, %": "distinct", "tokens as dense, %": "equal"}
    found |= {name: f"{100 * generation[key]:.1f}" for name, key in shares.items() if generation[key] is not None}
    return found | {"tokens until another": f"{generation['first_difference']:.1f}"}


def _note(notes: list[str], mark: str, sentence: str) -> str:
    if sentence not in notes:
        notes.append(sentence)
    return f"{mark} [{notes.index(sentence) + 1}]"


def tasks_of(row: dict) -> dict[str, dict]:
    """Return ``acc`` and its error for every task that has any: by the metric of a protocol, or lm-eval's ``acc``, or
    ``exact_match`` of a task whose answers are written."""
    if "protocol" in row:
        return {task: facts for task, facts in row["protocol"]["tasks"].items() if facts["acc"] is not None}
    found = {}
    for task, facts in row["measures"].get("tasks", {}).items():
        names = [name for name in facts if name.partition(",")[0] in ("acc", "exact_match")]
        name = min(names, key=lambda name: name != "acc", default="acc")
        if facts.get(name) is not None:
            found[task] = {"acc": facts[name], "acc_stderr": facts.get(f"{name}_stderr")}
    return found


def accuracy(task: dict) -> str:
    """Accuracy in per cent with its standard error."""
    error = task.get("acc_stderr")
    return f"{100 * task['acc']:.1f}" + (f" ± {100 * error:.1f}" if error is not None else "")


def _values(row: dict) -> dict[str, float]:
    """Return column -> number, such that less is better."""
    measures = row["measures"]
    found = {f"perplexity {text['text']}": text["perplexity"] for text in measures["texts"]}
    found |= {f"{task}, %": -facts["acc"] for task, facts in tasks_of(row).items()}
    if "protocol" in row:
        found[RETENTION] = -row["protocol"]["retention"]
    speed = measures.get("speed")
    return found | {f"{kind}, × dense": -speed[f"{kind}_ratio"] for kind in ("prefill", "decode") if speed}


def _rivals(rows: list[dict]) -> dict[float, dict[int, dict[str, float]]]:
    """Return sparsity -> line -> numbers, of sparsities that two rows or more have."""
    found: dict[float, dict[int, dict[str, float]]] = {}
    for line, row in enumerate(rows[1:], 1):
        if row["status"] == "done":
            found.setdefault(row["sparsity"], {})[line] = _values(row)
    return {sparsity: lines for sparsity, lines in sorted(found.items()) if len(lines) > 1}


def _best(rows: list[dict], header: list[str]) -> set[tuple[int, int]]:
    found = set()
    for lines in _rivals(rows).values():
        for column, name in enumerate(header):
            values = {line: numbers[name] for line, numbers in lines.items() if name in numbers}
            found |= {(line, column) for line, value in values.items() if value == min(values.values())}
    return found


def summary(rows: list[dict]) -> list[str]:
    """Return a sentence for every text: which method has the lowest perplexity at each sparsity."""
    rivals, sentences = _rivals(rows), []
    for i, text in enumerate(rows[0]["measures"]["texts"]):
        winners = []
        for sparsity, lines in rivals.items():
            best = min((rows[line] for line in lines), key=lambda row: row["measures"]["texts"][i]["perplexity"])
            value = best["measures"]["texts"][i]
            over = value["perplexity"] / text["perplexity"]
            winners.append(f"{best['label']} at {sparsity:g} ({_short(value['perplexity'])}, × {_short(over, '.2f')})")
        if winners:
            sentences.append(
                f"Lowest perplexity on {text['text']}: {', '.join(winners)}; the dense model has "
                f"{text['perplexity']:,.2f}."
            )
    return sentences


def by_quality(rows: list[dict]) -> list[str]:
    """Return the labels of methods, the one with the lowest perplexity on the first text first, by the mean logarithm
    over sparsities."""
    found: dict[str, list[float]] = {}
    for row in rows[1:]:
        values = [row["measures"]["texts"][0]["perplexity"]] if row["status"] == "done" else []
        found.setdefault(row["label"], []).extend(values)
    return sorted(found, key=lambda label: statistics.geometric_mean(found[label]) if found[label] else float("inf"))


def tables(rows: list[dict], width: int) -> list[Table]:
    """Return what of it a terminal has room for, in as many tables as it takes; notes stand below the last one.

    Args:
        width: of the terminal, in characters; where not even one measure fits, it stands alone.
    """
    cells = cells_of_table(rows)
    shown = [i for i, name in enumerate(cells.header) if name not in LEFT_OUT and not name.endswith(RATIO)]
    names, others = (
        [i for i in shown if cells.header[i] in NAMES],
        [i for i in shown if cells.header[i] not in NAMES],
    )
    widths = {i: _width(cells, i) for i in shown}
    room = width - 1 - sum(widths[i] + AROUND for i in names)
    parts = _parts([(i, widths[i] + AROUND) for i in others], room)
    found = [_shown(cells, {i: widths[i] for i in (*names, *part)}) for part in parts]
    found[-1].caption = Text("\n".join(numbered(cells.notes)), style="default")
    found[-1].caption_justify = "left"
    return found


def _width(cells: Cells, column: int) -> int:
    """Return the characters of a column: numbers stay in one piece, and words are folded where they are long."""
    name, longest = cells.header[column], max(len(line[column]) for line in cells.lines)
    if name in TEXTS:
        return min(max(longest, len(name)), FOLDED)
    return max(longest, min(max(map(len, name.split())), FOLDED // 2))


def _parts(columns: list[tuple[int, int]], room: int) -> list[list[int]]:
    """Return columns, each given with its width, in as few groups as fit, in their order."""
    found, left = [[]], room
    for column, width in columns:
        if width > left and found[-1]:
            found.append([])
            left = room
        found[-1].append(column)
        left -= width
    return found


def _shown(cells: Cells, columns: dict[int, int]) -> Table:
    """Return some columns as a table, each in its width: rich alone would take more than a terminal has, and cut it."""
    lines = [
        [Text(line[i], style="bold" if (number, i) in cells.best else "") for i in columns]
        for number, line in enumerate(cells.lines)
    ]
    return _table([cells.header[i] for i in columns], lines, box.HEAVY_HEAD, [*columns.values()])


def numbered(notes: list[str]) -> list[str]:
    """Return the notes with the numbers that cells refer to."""
    return [f"[{number}] {note}" for number, note in enumerate(notes, 1)]


def _table(header: list[str], lines: list[list[Text]], style: box.Box, widths: list[int] | None = None) -> Table:
    found = Table(box=style)
    for i, name in enumerate(header):
        justify = "left" if name in TEXTS else "right"
        found.add_column(name, justify=justify, overflow="fold", width=widths[i] if widths else None)
    for line in lines:
        found.add_row(*line)
    return found


def markdown(rows: list[dict]) -> str:
    """The table in Markdown, the best of each sparsity in bold, and its notes; what is in the cells cannot end them."""
    cells = cells_of_table([_escape(row) for row in rows])
    lines = [
        [Text(f"**{cell}**" if (number, i) in cells.best else cell) for i, cell in enumerate(line)]
        for number, line in enumerate(cells.lines)
    ]
    file = io.StringIO()
    console = Console(file=file, width=100_000, highlight=False, markup=False, emoji=False, color_system=None)
    console.print(_table(cells.header, lines, box.MARKDOWN))
    found = [line.strip() for line in file.getvalue().splitlines()]
    alike = "; ".join(f"{name} {value}" for name, value in cells.alike.items())
    below = [*numbered(cells.notes), *([f"All rows: {alike}."] if alike else [])]
    return "\n".join(line for line in found if line) + "\n" + "".join(f"\n{line}\n" for line in below)


def _escape(value: Any) -> Any:
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
