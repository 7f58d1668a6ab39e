"""Printing that several commands share."""

import json
import sys
from typing import TYPE_CHECKING

from ..report.outcomes import excess_of

if TYPE_CHECKING:
    from rich.table import Table

    from .plain import Plain


def plain(file) -> "Plain":
    """Return a console that prints to a file what it is given."""
    from .plain import Plain

    return Plain(file)


def console() -> "Plain":
    """Return the console for everything that is not the result."""
    return plain(sys.stderr)


def emit(result: dict, as_json: bool, human) -> None:
    """Print the result: one JSON object on stdout, or whatever ``human(console)`` prints there."""
    if as_json:
        print(json.dumps(result, allow_nan=False))  # escaped: not every terminal, and no lone surrogate, is UTF-8
    else:
        human(plain(sys.stdout))


def table_of(rows: list[dict[str, str]]) -> "Table":
    """Return a table of rows that have the same columns."""
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    return table


def result_of(record: dict) -> dict:
    """Return the main numbers of a run record."""
    seconds = dict(record["run"]["seconds"])
    spent = {"seconds": seconds.pop("total"), "seconds_by_part": seconds}
    found = {key: record.get(key) for key in ("held_out", "probe_texts")}
    found |= {key: record[key] for key in ("recovery", "goal") if key in record}
    return {**record["counts"], **spent, "excess": excess_of(record), **found}


def where_time_went(total: float, parts: dict[str, float]) -> str:
    """Return a line on the seconds of a run and of its parts."""
    digits = 1 if total < 100 else 0
    spent = ", ".join(f"{name.replace('_', ' ')} {seconds:.{digits}f}" for name, seconds in parts.items())
    return f"{total:.{digits}f} s: {spent}" if parts else f"{total:.{digits}f} s"
