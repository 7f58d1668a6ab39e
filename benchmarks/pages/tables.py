"""The writer of all tables: heads, rows, numbers, and the lines above them."""

import math
import re
from collections.abc import Callable, Iterable


def table(head: list[str], rows: Iterable[list[str]], *, tight: bool = False) -> list[str]:
    """Return the lines of a table.

    Args:
        tight: one space in an empty cell.
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    return [re.sub(r"\|  (?=\|)", "| ", line) for line in lines] if tight else lines


def crossed(cells: dict[tuple[str, str], str], *, head: str = "", tight: bool = False) -> list[str]:
    """Return names by columns; columns that are numbers ascend, and others follow in their order."""
    names, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    columns.sort(key=_place)
    body = [[name, *(cells.get((name, column), "") for column in columns)] for name in names]
    return table([head, *columns], body, tight=tight)


def _place(column: str) -> float:
    try:
        return float(column.rstrip("%"))
    except ValueError:
        return math.inf


def by_sparsity(rows: list[dict], cell: Callable[[dict], str], *, name=lambda row: row["setting"], **form) -> list[str]:
    """Return settings by sparsity."""
    return crossed({(name(row), f"{row['sparsity']:.0%}"): cell(row) for row in rows}, **form)


def named(record: dict) -> dict[str, dict]:
    """Return name -> row of a record."""
    return {row["name"]: row for row in record["rows"]}


def percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def number(perplexity: float | None) -> str:
    if perplexity is None:
        return "failed"
    if perplexity >= 1e6:
        return f"{perplexity:.1e}"
    return f"{perplexity:.2f}" if perplexity < 1000 else f"{perplexity:,.0f}"


def score(row: dict) -> str:
    """Return the perplexity, marked where the run itself warned."""
    return number(row.get("perplexity")) + (" (!)" if row.get("damaged") else "")


def setting(row: dict) -> str:
    return row.get("setting", "dense")


def dense_of(record: dict) -> dict | None:
    return next((row for row in record["rows"] if row["name"] == "dense"), None)


def compressed(record: dict) -> list[dict]:
    return [row for row in record["rows"] if row["name"] != "dense"]


def windows(facts: dict) -> str:
    return f"{facts['samples']} x {facts['length']} tokens"


def texts(record: dict) -> list[str]:
    """Return what was calibrated on and what was evaluated on."""
    calibration, evaluation = (record["config"][use] for use in ("calibration", "evaluation"))
    evaluated = [evaluation] if "source" in evaluation else evaluation.values()
    lines = [f"- calibration: {windows(calibration)} of `{calibration['source']}`"]
    return lines + [f"- evaluation: {windows(text)} of `{text['source']}`" for text in evaluated]
