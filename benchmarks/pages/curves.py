"""Pictures of a page: curves out of a record, as PNG next to the page."""

from pathlib import Path

Curves = dict[str, list[tuple[float, float]]]  # name -> points

LOST = 100  # times the best perplexity of a picture


def picture(
    folder: Path | None, file: str, title: str, curves: Curves, *, x: str, y: str, dense: float | None = None
) -> list[str]:
    """Return the line of a page that shows a picture, which is written into the folder; none where there is no curve.

    Args:
        folder: ``None``: nothing is drawn.
        file: its name.
        x: label of the axis, as ``y``.
        dense: height of the dense model's line.
    """
    if not curves:
        return []
    if folder:
        (folder / file).write_bytes(_drawn(file, title, curves, x, y, dense))
    return [f"![{title}]({file})", ""]


def by_sparsity(rows: list[dict], *, at=lambda row: row["sparsity"], value=lambda row: row["perplexity"]) -> Curves:
    """Return setting -> sparsity in per cent with a value, of settings with three points or more."""
    found: Curves = {}
    for row in sorted((row for row in rows if "error" not in row), key=at):
        found.setdefault(row["setting"], []).append((100 * at(row), value(row)))
    return {name: points for name, points in found.items() if len(points) > 2}


def lowest(curves: Curves, count: int = 8) -> Curves:
    """Return the curves that end lowest: more cannot be told apart, nor these beside one that is lost from the first
    point on."""
    best = min((value for points in curves.values() for _, value in points), default=0.0)
    seen = {name: points for name, points in curves.items() if points[0][1] < LOST * best}
    return dict(sorted(seen.items(), key=lambda curve: curve[1][-1][1])[:count])


def _drawn(file: str, title: str, curves: Curves, x: str, y: str, dense: float | None) -> bytes:
    from rankfold.comparison.report import plots  # the extra rankfold[report]

    def draw():
        figure, axes = plots.panel(title)
        for index, (name, points) in enumerate(curves.items()):
            look = plots.style(index) | ({"markersize": 3} if len(points) > 12 else {})
            axes.plot(*zip(*points, strict=True), label=plots.shorten(name), **look)
        values = [value for points in curves.values() for _, value in points] + ([dense] if dense else [])
        if dense:
            axes.axhline(dense, color="0.5", linestyle=":", linewidth=1.2, label="dense")
        axes.set_xlabel(x)
        axes.set_ylabel(y + (plots.scale(axes, values) if min(values) > 0 else ""))
        return plots.legend(figure, axes)

    return plots.drawn(plots.Picture(Path(file).stem, title, "results", draw)).png
