"""The page of LowRankArena's rules: the table that `rankfold compare` makes, and what was done otherwise."""

from rankfold.comparison.protocol import protocol_lines
from rankfold.comparison.report.table import markdown


def lowrankarena(record: dict) -> list[str]:
    config = record["config"]
    rows = [named(row, config["texts"]) if row["status"] == "done" else row for row in record["rows"]]
    return [*(f"- {line}" for line in protocol_lines(config["protocol"])), "", *markdown(rows).splitlines(), ""]


def named(row: dict, names: list[str]) -> dict:
    """Return a row whose texts have these names in place of their files'."""
    texts = [facts | {"text": name} for name, facts in zip(names, row["measures"]["texts"], strict=True)]
    return row | {"measures": row["measures"] | {"texts": texts}}
