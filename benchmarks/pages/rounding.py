"""The page on rounding: what pruning and rounding cost, alone and together."""

import math

from .same_bytes import best
from .tables import table, windows


def rounding(record: dict) -> list[str]:
    """Return the files that no other one beats, and every file with the loss that its parts alone add up to."""
    rows, config = record["rows"], record["config"]
    lost = {row["name"]: math.log(row["perplexity"]["text"] / rows[0]["perplexity"]["text"]) for row in rows}

    def alone(row: dict) -> str:
        name, form = row["name"].rsplit(" ", 1)
        pruned, rounded = f"{name} {rows[0]['format']}", f"dense {form}"
        return f"{lost[pruned] + lost[rounded]:.4f}"

    names = best(rows, "bytes", "text")
    return [
        f"- calibration: {windows(config['calibration'])} of `{config['calibration']['source']}`",
        f"- evaluation: {windows(config['evaluation'])} of `{config['evaluation']['source']}`",
        "",
        "In bold: no other row is as small and better. Loss: nats per token more than the first row. Expected: what "
        "pruning alone and rounding alone lose, added.",
        "",
        *table(
            ["weights", "MB", "perplexity", "loss", "expected"],
            [
                [
                    f"**{row['name']}**" if row["name"] in names else row["name"],
                    f"{row['bytes'] / 1e6:.2f}",
                    f"{row['perplexity']['text']:.2f}",
                    f"{lost[row['name']]:.4f}",
                    alone(row) if row["sparsity"] else "",
                ]
                for row in rows
            ],
        ),
    ]
