"""`rankfold methods`"""

from rich.table import Table

from ..methods import METHODS
from . import common as c
from . import options as o


def command(json: o.Json = False) -> None:
    """List the compression methods, with their papers.

    \b
    rankfold methods
    """
    rows = [
        {"method": name, "what it does": entry.summary, "paper": f"arXiv:{entry.paper}" if entry.paper else ""}
        for name, entry in METHODS.items()
    ]

    def show(out) -> None:
        table = Table(*rows[0])
        for row in rows:
            table.add_row(*row.values())
        out.print(table)

    c.emit({"methods": rows}, json, show)
