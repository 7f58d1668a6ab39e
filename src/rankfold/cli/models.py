"""`rankfold models`"""

from rich.table import Table

from ..architectures import known_architectures
from . import common as c
from . import options as o


def command(json: o.Json = False) -> None:
    """List the model families, and what of each can be compressed.

    \b
    rankfold models
    """
    rows = [
        {
            "model_type": a.model_type,
            "mlp": a.mlp is not None,
            "qk": "dense with q/k-norm" if a.attention.qk_norm else {"rope": "pairs"}.get(a.attention.position, "svd"),
            "vo": "svd",
        }
        for a in known_architectures()
    ]

    def table(out) -> None:
        grid = Table("model_type", "mlp", "qk", "vo")
        for row in rows:
            grid.add_row(row["model_type"], "units" if row["mlp"] else "dense (experts)", row["qk"], row["vo"])
        out.print(grid)

    c.emit({"models": rows}, json, table)
