"""`rankfold inspect`"""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ..errors import CheckpointError
from ..files import read_json
from . import common as c


def command(
    folder: Annotated[Path, typer.Argument(help="Folder written by `rankfold compress`.")],
    json: c.Json = False,
) -> None:
    """Show what a compressed checkpoint is: method, ranks, errors measured, sizes.

    \b
    rankfold inspect small
    """
    if not (folder / "rankfold.json").exists():
        raise CheckpointError(f"{folder} has no rankfold.json: not a checkpoint written by `rankfold compress`")
    record = read_json(folder / "rankfold.json")
    c.emit(record, json, lambda out: _print(record, out))


def _print(record: dict, out) -> None:
    counts, calibration = record["counts"], record["calibration"]
    out.print(
        f"{record['base_model']} compressed by {record['method']} ({record['mode']}), rankfold {record['rankfold_version']}"
    )
    out.print(f"calibrated on {calibration['samples']} x {calibration['length']} tokens of {calibration['source']}")
    table = Table()
    names = list(dict.fromkeys(module for block in record["blocks"].values() for module in block))
    table.add_column("block", justify="right")
    for name in names:
        table.add_column(name, justify="right")
        table.add_column("error", justify="right")
    for block, reports in record["blocks"].items():
        cells = []
        for name in names:
            report = reports.get(name)
            cells += [f"{report['rank']}/{report['of']}", f"{report['relative_error']:.3f}"] if report else ["-", ""]
        table.add_row(block, *cells)
    out.print(table)
    out.print(
        f"{counts['sparsity']:.2%} of {counts['counted_weights']:,} counted weights removed; {counts['parameters']:,} "
        f"parameters, {counts['bytes'] / 2**20:.1f} MiB, {counts['kv_bytes_per_token']:,} cache bytes per token"
    )
