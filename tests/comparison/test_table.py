"""The table of a comparison in a terminal: nothing of it is cut off, whatever the width."""

import io
from typing import Any

import pytest
from rich.console import Console

from rankfold.comparison.report.plots import result_pictures
from rankfold.comparison.report.table import cells_of_table, tables

TASKS = {f"a_task_with_a_name_{n}": {"acc": n / 8, "acc_stderr": 0.025} for n in range(8)}


def row(label: str, sparsity: float, warning: str | None = None) -> dict:
    """Return a row of ten measures."""
    texts = [{"text": f"text-{n}.txt", "perplexity": 1234.5 + n + sparsity, "warning": warning} for n in range(2)]
    counts = {"sparsity": sparsity, "parameters": 1e6, "bytes": 2e6, "kv_bytes_per_token": 128}
    facts = {
        "label": label,
        "sparsity": sparsity,
        "status": "done",
        "counts": counts,
        "mode": None,
        "probe_texts": None,
    }
    return facts | {"measures": {"texts": texts, "tasks": TASKS}, "compress_seconds": None, "held_out": None}


ROWS = [row("dense", 0.0, "the model guesses"), row("rankfold", 0.3), row("a method:with=many,options=of:its=own", 0.3)]


@pytest.mark.parametrize("width", [60, 80, 120, 240])
def test_every_measure_is_in_a_table_that_the_terminal_has_room_for(width):
    found = tables(ROWS, width)
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None)
    console.print(*found)
    wide = Console(width=10_000)
    assert all(wide.measure(table).maximum <= width for table in found)
    names = [str(column.header) for table in found for column in table.columns]
    assert names.count("method") == names.count("sparsity") == len(found)
    assert sorted({*names} - {"method", "sparsity"}) == sorted(
        ["perplexity text-0.txt", "perplexity text-1.txt", "note", *(f"{task}, %" for task in TASKS)]
    )
    shown = file.getvalue()
    assert all(f"{100 * n / 8:.1f} ± 2.5" in shown for n in range(8)) and "1,235.80 (× 1.00)" in shown
    assert shown.count("the model guesses") == 1


def test_tables_are_as_few_as_fit():
    """The next column of a table would not have fitted into the one before."""
    first, second, *_ = tables(ROWS, 80)
    width = Console(width=10_000).measure(first).maximum
    assert width + second.columns[2].width + 3 > 80 >= width


def test_a_task_whose_answers_are_written_has_a_column():
    """GSM8K has no `acc`; the first of the ways in which its answers are read is the one of the table."""
    scores = {"exact_match,strict-match": 0.25, "exact_match,strict-match_stderr": 0.125, "exact_match,other": 0.5}
    rows = [row("dense", 0.0), row("rankfold", 0.3)]
    for one in rows:
        one["measures"]["tasks"] = {"gsm8k": scores, "piqa": {"exact_match": 0.0, "acc": 0.5}, "wiki": {"bleu": 2.0}}
    cells = cells_of_table(rows)
    found = dict(zip(cells.header, cells.lines[1], strict=True))
    assert found["gsm8k, %"] == "25.0 ± 12.5" and found["piqa, %"] == "50.0" and "wiki, %" not in found


def test_the_picture_of_the_tasks_has_the_numbers_of_the_table():
    """By a protocol these are of its metric, not of lm-eval's `acc`."""
    rows = [row("dense", 0.0), row("rankfold", 0.3)]
    for one in rows:
        judged = {task: {"acc": facts["acc"] / 2, "acc_stderr": None} for task, facts in TASKS.items()}
        one["protocol"] = {"tasks": judged, "means": {}, "kept": 1.0, "retention": 1.0}
    (picture,) = (picture for picture in result_pictures(rows) if picture.name == "tasks-0.3")
    curve: Any = picture.draw().axes[0].lines[1].get_ydata()
    assert [*curve[:-1]] == [100 * facts["acc"] / 2 for facts in TASKS.values()]
