"""The page of mutants.json: a line a file, then every survivor, with why it may stay where somebody looked into it."""

import tomllib
from pathlib import Path

REASONS = Path(__file__).resolve().parent.parent / "scripts" / "survivors.toml"
HEAD = ["file", "mutants", "tried", "killed", "timed out", "survived", "explained", "score"]


def table(record: dict) -> list[str]:
    rows = sorted(record["rows"], key=lambda row: row["name"])
    reasons = tomllib.loads(REASONS.read_text(encoding="utf-8"))
    why = {row["name"]: [reason(row["name"], mutant, reasons) for mutant in row["survived"]] for row in rows}
    counts = [counted(row, why[row["name"]]) for row in rows]
    total = [sum(column) for column in zip(*counts, strict=True)]
    body = [line(f"`{row['name']}`", count) for row, count in zip(rows, counts, strict=True)]
    grid = [f"| {' | '.join(cells)} |" for cells in (HEAD, ["---"] * len(HEAD), *body, line("all", total))]
    sections = [text for row in rows for text in survivors(row, why[row["name"]])]
    return [*grid, "", *sections, "Reasons are those of `scripts/survivors.toml`."]


def counted(row: dict, why: list[str]) -> list[int]:
    found = [len(row["timed_out"]), len(row["survived"]), sum(map(bool, why))]
    return [row["mutants"], row["tried"], row["killed"], *found]


def line(name: str, count: list[int]) -> list[str]:
    _, tried, killed, endless, *_ = count
    return [name, *map(str, count), f"{(killed + endless) / tried:.0%}"]


def survivors(row: dict, why: list[str]) -> list[str]:
    if not row["survived"]:
        return []
    lines = [f"### {row['name']}", ""]
    for mutant, text in zip(row["survived"], why, strict=True):
        lines.append(f"- `{mutant['function']}`: {code(mutant['old'])} → {code(mutant['new'])}")
        lines += [f"  {text}"] if text else []
    return [*lines, ""]


def code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def reason(file: str, mutant: dict, reasons: dict) -> str:
    """Why a survivor may stay; empty where nobody said."""
    for entry in reasons.get(file, []):
        if all(entry[key] == mutant[key] for key in ("function", "old", "new")):
            return entry["why"]
    return ""
