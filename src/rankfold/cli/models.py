"""`rankfold models`"""

from rich.table import Table

from ..architectures import known_architectures
from ..architectures.spec import AttentionSpec
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
            "qk": _form(a.attention),
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


def _form(attention: AttentionSpec) -> str:
    if attention.qk_norm:
        return "dense with q/k-norm"
    if attention.position != "rope":
        return "svd"
    return "pairs; svd in layers that do not rotate" if attention.rotates else "pairs"
