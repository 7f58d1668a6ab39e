"""The table of a comparison in a terminal: nothing of it is cut off, whatever the width."""

import io

import pytest
from rich.console import Console

from rankfold.comparison.report.table import tables

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
