"""The page on bytes: a picture, and the numbers of all files, bold where no other file beats them."""

import io
from pathlib import Path

from .tables import number, table, windows

PANELS = {
    "bytes": "size, MB",
    "prefill": "prefill, tokens/s",
    "decode": "decode, tokens/s",
}  # what is against perplexity
TOOLS = {"llama_cpp": "llama.cpp", "torchao": "torchao"}  # key of the configuration -> what quantised
NEAR = 0.02  # points that are nearer to one with a name have none: names would lie on each other
SMALLER = "bytes"  # of the panels the one where less is better


def same_bytes(record: dict, folder: Path | None) -> list[str]:
    """Return the picture, written into the folder, the files that no other one beats, and the table."""
    rows, config = record["rows"], record["config"]
    texts = list(rows[0]["perplexity"])
    evaluated = [
        f"- {name}: {facts['windows']} windows of `{facts['source']}`" for name, facts in config["evaluation"].items()
    ]
    speed = (
        f", speeds: medians of {rows[0]['rounds']} rounds, {rows[0]['threads']} threads" if "rounds" in rows[0] else ""
    )
    tool = next(key for key in TOOLS if key in config)
    about = f"- {TOOLS[tool]} {config[tool]}{speed}"
    lines = [
        f"- calibration: {windows(config['calibration'])} of `{config['calibration']['source']}`",
        *evaluated,
        about,
        "",
    ]
    file = f"{record['benchmark']}-{Path(config['model']['name']).stem}.png"
    if folder:
        (folder / file).write_bytes(picture(rows, texts[0]))
    against = ", ".join(PANELS[what].partition(",")[0] for what in _measured(rows))
    lines += [f"![Perplexity on {texts[0]} against {against}]({file})", ""]
    bold = "In bold: perplexity that no other row as small reaches"
    if _speeds(rows):
        bold += f"; speed that no other row as good on {texts[0]} reaches"
    return [*lines, f"{bold}.", "", *_table(rows, texts)]


def best(rows: list[dict], what: str, text: str) -> list[str]:
    """Return the names of the rows that no other one beats in both, from the lowest perplexity on.

    Args:
        what: ``bytes``, which are to be few, or a speed.
    """
    sign = 1 if what == SMALLER else -1

    def key(row: dict) -> tuple[float, float]:
        return row["perplexity"][text], sign * row[what]

    found, least = [], float("inf")
    for row in sorted((row for row in rows if what in row), key=key):
        if sign * row[what] < least:
            found.append(row["name"])
            least = sign * row[what]
    return found


def _measured(rows: list[dict]) -> list[str]:
    return [what for what in PANELS if all(what in row for row in rows)]


def _speeds(rows: list[dict]) -> list[str]:
    return [what for what in _measured(rows) if what != SMALLER]


def _table(rows: list[dict], texts: list[str]) -> list[str]:
    speeds = _speeds(rows)
    bold = {(text, SMALLER): best(rows, SMALLER, text) for text in texts}
    bold |= {(texts[0], what): best(rows, what, texts[0]) for what in speeds}

    def marked(row: dict, cell: str, *key: str) -> str:
        return f"**{cell}**" if row["name"] in bold[key] else cell

    def cells(row: dict) -> list[str]:
        good = [marked(row, number(row["perplexity"][text]), text, SMALLER) for text in texts]
        fast = [marked(row, f"{row[what]:,.0f} (× {row[f'{what} ratio']:.2f})", texts[0], what) for what in speeds]
        far = [f"{round(row['divergence'][text], 3) + 0:.3f}" for text in diverged]
        return [
            row["model"],
            row["format"],
            f"{row['bytes'] / 1e6:.1f}",
            *good,
            *far,
            *fast,
            str(row["fallback"] or ""),
        ]

    diverged = texts if all("divergence" in row for row in rows) else []
    far = [f"divergence, {text}" for text in diverged]
    return table(["model", "format", "MB", *texts, *far, *speeds, "fallback"], map(cells, rows))


def picture(rows: list[dict], text: str) -> bytes:
    """Draw the perplexity on one text against bytes and against every speed that was measured, as PNG."""
    from matplotlib.figure import Figure  # the extra rankfold[report]

    from rankfold.comparison.report.plots import scale, style

    measured = _measured(rows)
    figure = Figure(figsize=(7, 3.6 * len(measured)), layout="constrained")
    for axes, what in zip(figure.subplots(len(measured), 1, squeeze=False)[:, 0], measured, strict=True):
        for index, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
            mine = sorted((row for row in rows if row["model"] == model), key=lambda row: row[SMALLER])
            points = [(row[what] / (1e6 if what == SMALLER else 1), row["perplexity"][text]) for row in mine]
            look = style(index) | ({} if what == SMALLER else {"linestyle": "none"})
            axes.plot(*zip(*points, strict=True), label=model, markersize=5, linewidth=1, alpha=0.85, **look)
            last = None
            for row, point in zip(mine, points, strict=True) if index == 0 else ():
                if last is None or max(abs(a - b) / abs(b) for a, b in zip(point, last, strict=True)) > NEAR:
                    how = {"xytext": (2, 4), "textcoords": "offset points", "fontsize": 7, "rotation": 45}
                    axes.annotate(row["format"], last := point, **how)
        said = scale(axes, [row["perplexity"][text] for row in rows])
        axes.set(xlabel=PANELS[what], ylabel=f"perplexity on {text}{said}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False, fontsize=8)
    found = io.BytesIO()
    figure.savefig(found, format="png", dpi=150, metadata={"Software": None})
    return found.getvalue()
