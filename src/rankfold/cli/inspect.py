"""`rankfold inspect`"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..report.outcomes import recovery_lines, warnings_of
from . import common as c
from . import options as o
from .summary import removed, show_numbers

if TYPE_CHECKING:
    from rich.console import Console


def command(
    folder: Annotated[
        Path, typer.Argument(help="Folder that `rankfold compress` or `recover` wrote.", rich_help_panel="Model")
    ],
    json: o.Json = False,
) -> None:
    """Show method, ranks, errors and sizes of a checkpoint.

    \b
    rankfold inspect small
    """
    from ..report.record import NAME, read_record, records_of

    if folder.exists() and not (folder / NAME).exists():
        from ..models.given import resolve_model

        resolve_model(folder)  # says what else it is
    record = read_record(folder)
    c.emit(record, json, lambda out: [_print(one, out) for one in records_of(record)])


def _print(record: dict[str, Any], out: "Console") -> None:
    from ..report.model_card import measured_on

    calibration, component = record["calibration"], record["plan"].get("part")
    name = f"{record['base_model']}, {component}," if component else record["base_model"]
    out.print(f"{name} compressed by {record['method']} ({record['mode']}), rankfold {record['rankfold_version']}")
    out.print(f"calibrated on {measured_on(calibration)} of {calibration['source']}")
    from rich.table import Column, Table

    table = Table(Column("block", justify="right"))
    names = list(dict.fromkeys(module for block in record["blocks"].values() for module in block))
    for column in (column for name in names for column in (name, "error", "held out")):
        table.add_column(column, justify="right")
    for block, reports in record["blocks"].items():
        table.add_row(block, *(cell for name in names for cell in _cells(reports.get(name))))
    out.print(table)
    out.print(removed(record["counts"]))
    show_numbers(record, out)
    for line in (*warnings_of(record), *recovery_lines(record)):
        out.print(line, soft_wrap=True)


def _cells(report: dict[str, Any] | None) -> tuple[str, str, str]:
    """Return rank, error on the calibration moments and on the samples held out."""
    if report is None:
        return "-", "", ""
    held_out = report.get("held_out_error")
    error = f"{report['relative_error']:.3f}"
    return f"{report['rank']}/{report['of']}", error, "" if held_out is None else f"{held_out:.3f}"
