"""The page of the gates: what every method keeps of the dense model, beside what it must keep."""

from .tables import table


def gates(record: dict) -> list[str]:
    names = [name for name in record["definitions"] if any(name in row.get("kept", {}) for row in record["rows"])]
    body = [
        [f"`{row['setting']}`", f"{row['sparsity']:.0%}", *(cell(row, name) for name in names)]
        for row in record["rows"]
    ]
    return [
        "Kept of the dense model, and what must be kept where there is a gate; bold: it falls short.",
        "",
        *table(["method", "sparsity", *names], body),
        *writing(record),
    ]


def writing(record: dict) -> list[str]:
    """Return the table of what the models write, where the record has it."""
    dense = record.get("written by the dense model")
    if dense is None:
        return []
    rows = {"dense": dense} | {
        f"`{row['setting']}` {row['sparsity']:.0%}": row["written"] for row in record["rows"] if "written" in row
    }
    body = [
        [name, *("–" if found.get(key) is None else f"{found[key]:.3g}" for key in dense)]
        for name, found in rows.items()
    ]
    return ["", "What they write:", "", *table(["model", *dense], body)]


def cell(row: dict, name: str) -> str:
    """Return what is kept and what must be; bold where it falls short."""
    if "error" in row:
        return "failed"
    kept, least = row["kept"].get(name), row["least"].get(name)
    stated = "–" if kept is None else f"{kept:.3f}"
    if least is None:
        return stated
    return f"**{stated}** (≥ {least:g})" if (kept or 0.0) < least else f"{stated} (≥ {least:g})"
