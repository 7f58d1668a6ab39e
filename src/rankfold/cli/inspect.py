"""`rankfold inspect`"""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from . import common as c
from . import options as o


def command(
    folder: Annotated[Path, typer.Argument(help="Folder written by `rankfold compress`.")],
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


def _print(record: dict, out) -> None:
    from ..report.model_card import measured_on
    from ..report.outcomes import excess_of, recovery_lines, warnings_of

    counts, calibration = record["counts"], record["calibration"]
    part = f", {record['plan']['part']}," if record["plan"].get("part") else ""
    out.print(
        f"{record['base_model']}{part} compressed by {record['method']} ({record['mode']}), rankfold "
        f"{record['rankfold_version']}"
    )
    out.print(f"calibrated on {measured_on(calibration)} of {calibration['source']}")
    table = Table()
    names = list(dict.fromkeys(module for block in record["blocks"].values() for module in block))
    table.add_column("block", justify="right")
    for name in names:
        table.add_column(name, justify="right")
        table.add_column("error", justify="right")
        table.add_column("held out", justify="right")
    for block, reports in record["blocks"].items():
        table.add_row(block, *(cell for name in names for cell in _cells(reports.get(name))))
    out.print(table)
    out.print(
        f"{counts['sparsity']:.2%} of {counts['counted_weights']:,} counted weights {c.gone(counts)}; {counts['parameters']:,} "
        f"parameters, {counts['bytes'] / 2**20:.1f} MiB, {counts['kv_bytes_per_token']:,} of "
        f"{record['plan']['kv_bytes_per_token']:,} KV-cache bytes per token"
    )
    if excess := excess_of(record):
        out.print(excess)
    if held_out := record.get("held_out"):  # older checkpoints have none
        out.print(c.outcome(held_out), soft_wrap=True)
    recovered = recovery_lines(record.get("recovery"))
    for line in (*c.kinds_of_text(record.get("probe_texts")), *warnings_of(record), *recovered):
        out.print(line, soft_wrap=True)


def _cells(report: dict | None) -> tuple[str, str, str]:
    """Rank, error on the calibration moments and on the windows held out."""
    if report is None:
        return "-", "", ""
    held_out = report.get("held_out_error")
    error = f"{report['relative_error']:.3f}"
    return f"{report['rank']}/{report['of']}", error, "" if held_out is None else f"{held_out:.3f}"
