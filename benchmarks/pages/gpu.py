"""The page of what was measured on accelerators: a record of benchmarks/gpu.py."""

import math
from collections.abc import Callable

from .costs import settled
from .tables import table

GIB = 2**30


def gpu(record: dict) -> list[str]:
    """Return a section for every job that has rows; errors and cards below the tables."""
    if record["config"]["device"] == "cpu" or record["config"]["tiny"]:
        raise ValueError("a record of a CPU or of tiny sizes is none of an accelerator")
    lines: list[str] = []
    for job, (title, section) in SECTIONS.items():
        rows = [row for row in record["rows"] if row["job"] == job]
        if not rows:
            continue
        done = [row for row in rows if "error" not in row]
        lines += [f"### {title}", "", f"`python benchmarks/gpu.py {job}`; {_cards(rows)}.", "", *section(done), ""]
        lines += [f"- {_name(row)}: {row['error']}" for row in rows if "error" in row] + [""]
    return lines


def _cards(rows: list[dict]) -> str:
    keys = {"card": "{}", "driver_version": "driver {}", "torch": "torch {}", "cuda": "CUDA {}"}
    found = (", ".join(text.format(row[key]) for key, text in keys.items() if row.get(key)) for row in rows)
    clocks = [float(row["clocks.sm"]) for row in rows if str(row.get("clocks.sm", "")).replace(".", "").isdigit()]
    return "; ".join(dict.fromkeys(found)) + (f"; {min(clocks):.0f} to {max(clocks):.0f} MHz" if clocks else "")


def _name(row: dict) -> str:
    return row["name"].removeprefix(f"{row['job']} ")


def _digits(value: float | None) -> str:
    if value is None:
        return "–"
    return (
        f"{value:.3g}"
        if value == 0 or 1e-3 <= abs(value) < 1e4
        else f"{value:.1e}"
        if math.isfinite(value)
        else str(value)
    )


def _rates(rows: list[dict]) -> list[str]:
    body = [
        [_name(r), _digits(1e3 * r["seconds"]), _digits(r.get("rate")), r.get("unit") or ""]
        for r in rows
        if "unit" in r
    ]
    routines = [
        [_name(r), _digits(1e3 * r["seconds"]), _digits(1e3 * r["predicted_seconds"])] for r in rows if "of" in r
    ]
    entry = [f"In the form of the plan's table: `{r['entry']}`" for r in rows if "entry" in r]
    first = table(["", "ms", "rate", "unit"], body)
    return [*first, "", *table(["", "ms", "ms predicted"], routines), "", *entry]


def _parity(rows: list[dict]) -> list[str]:
    body = [
        [
            _name(r),
            _digits(r["kl"]),
            _digits(r["limit"]) + ("" if r["limit"] is None else " met" if r["met"] else " **missed**"),
            _digits(r["kl_dense"]),
            f"{r['perplexity_ratio']:.5f}",
            "yes" if r["same_ranks"] else "no",
        ]
        for r in rows
        if "kl" in r
    ]
    again = [
        [_name(r), *("–" if same is None else "yes" if same else "no" for same in r["same"].values())]
        for r in rows
        if "same" in r
    ]
    head = next((list(r["same"]) for r in rows if "same" in r), [])
    first = table(["", "KL", "limit", "KL of compressing", "ratio of perplexities", "same ranks"], body)
    return [*first, "", *(table(["the same bytes", *head], again) if again else [])]


def _precision(rows: list[dict]) -> list[str]:
    settings = list(dict.fromkeys(name for r in rows for name in r["errors"]))
    body = [
        [
            _name(r),
            *(_digits(r["errors"].get(name)) for name in settings),
            _digits(r["cross_error"]),
            "yes" if r["tf32"] else "no",
        ]
        for r in rows
    ]
    return table(["", *settings, "cross moment", "TF32 allowed"], body)


def _waits(rows: list[dict]) -> list[str]:
    body = [
        [
            _name(r),
            "–" if r["waits"] is None else str(r["waits"]),
            "; ".join(f"`{p}` {n}" for p, n in r["places"].items()),
        ]
        for r in rows
    ]
    return table(["", "waits a block", "most of them"], body)


def _blocks(rows: list[dict]) -> list[str]:
    parts = [part for part in (rows[0]["parts"] if rows else ()) if part != "total"]
    body = [
        [
            _name(r),
            f"{r['total']:.1f}",
            *(f"{r['parts'].get(part, 0.0):.1f}" for part in parts),
            _digits(r["block_seconds"]),
            f"{r['whole_minutes']:.1f}",
            f"{r['predicted_minutes']:.1f}",
            f"{r['peak_bytes'] / GIB:.1f}",
            f"{r['plan_bytes'] / GIB:.1f}",
        ]
        for r in rows
    ]
    head = ["", "s", *(part.replace("_", " ") for part in parts), "s a block", "min, all blocks", "min, predicted"]
    return table([*head, "peak, GiB", "plan, GiB"], body)


def _speed(rows: list[dict]) -> list[str]:
    names = list(dict.fromkeys(name for r in rows for name in r["found"]))
    body = [[_name(r), *(settled(r["found"][name]) for name in names)] for r in rows]
    facts = [
        f"- {name}: widths {', '.join(map(str, widths))}; {rows[0]['weight_bytes'][name] / 1e9:.2f} GB read a token"
        for name, widths in (rows[0]["widths"] if rows else {}).items()
    ]
    kernels = [f"- {_name(r)}, {n}: {', '.join(k) or 'none'}" for r in rows for n, k in r.get("attention", {}).items()]
    return [*table(["tokens per second", *names], body), "", *facts, *kernels]


SECTIONS: dict[str, tuple[str, Callable[[list[dict]], list[str]]]] = {
    "rates": ("Rates", _rates),
    "parity": ("The same result as on a CPU", _parity),
    "precision": ("Precision of moments", _precision),
    "waits": ("Waiting for the device", _waits),
    "blocks": ("A few blocks of large models", _blocks),
    "whole": ("A whole model", _blocks),
    "speed": ("Speed of the results", _speed),
}
