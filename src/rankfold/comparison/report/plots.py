"""Pictures of a comparison: a number of the table becomes a curve. One panel a picture, wide enough for a telephone."""

import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from ..._utils.files import write_bytes, write_text
from .table import by_quality, tasks_of

WIDTH, HEIGHT, DPI = 4.6, 3.5, 200  # inches of a panel
PAGE_WIDTH = 9.2  # inches of the main picture on a desk
LINE = 0.19  # inches of a line of the legend; a panel has room for two
LARGEST = 1e100  # perplexity that is drawn: Matplotlib's transforms overflow on the way to the largest floats
WIDE = 4  # largest value over the smallest from which on a scale is logarithmic
# Told apart by most eyes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f3fbf", "#7f7f7f")
MARKERS, DASHES = "osD^vPX*", ("-", "--", "-.", ":")
INKS = {"light": ("#1a1a1a", "#ffffff"), "dark": ("#e6e6e6", "#16181c")}  # ink, paper


class Picture(NamedTuple):
    """One picture, drawn when it is asked for."""

    name: str  # of its files
    title: str
    group: str  # what it stands under: results, or a method
    draw: Callable[[], Figure]


def result_pictures(rows: list[dict]) -> list[Picture]:
    """Return the pictures of what was measured; the first row is the dense model."""
    done = [row for row in rows if row["status"] == "done"]
    dense, labels = done[0], by_quality(rows)
    styles = {label: style(index) for index, label in enumerate(labels)}
    found = []
    if len(done) > 1:
        for i, text in enumerate(dense["measures"]["texts"]):
            found.append(_perplexity(i, text["text"], done, styles))
        if "speed" in dense["measures"]:
            found += [_speed(kind, done, styles) for kind in ("prefill", "decode")]
        tasks = [*tasks_of(dense)]
        if len(tasks) > 2:  # fewer span nothing
            found += [
                _radar(tasks, sparsity, done, styles) for sparsity in sorted({row["sparsity"] for row in done[1:]})
            ]
    return found


def style(index: int) -> dict:
    """Colour, marker and dash of a curve; 64 before two are alike."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
    }


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=]+", "-", text).strip("-")[:60]


def _value(row: dict, index: int = 0) -> float:
    """Perplexity on a text, as far as it can be drawn."""
    return min(row["measures"]["texts"][index]["perplexity"], LARGEST)


def _perplexity(index: int, text: str, done: list[dict], styles: dict) -> Picture:
    """MoDeGPT's tables as curves; log scale."""

    def value(row: dict) -> float:
        return _value(row, index)

    def draw() -> Figure:
        figure, axes = panel(f"perplexity on {text}")
        for label, look in styles.items():
            mine = sorted((row["counts"]["sparsity"], value(row)) for row in done[1:] if row["label"] == label)
            if mine:
                axes.plot([100 * x for x, _ in mine], [y for _, y in mine], label=shorten(label), **look)
        axes.axhline(value(done[0]), color="0.5", linestyle=":", linewidth=1.2, label="dense")
        axes.set_xlabel("sparsity reached (% of the counted weights)")
        axes.set_ylabel(f"perplexity{scale(axes, [value(row) for row in done])}")
        return legend(figure, axes)

    return Picture(f"perplexity-{index + 1}-{slug(text)}", f"Perplexity on {text} against sparsity", "results", draw)


def _speed(kind: str, done: list[dict], styles: dict) -> Picture:
    """MoDeGPT Fig. 3, with ratios to the dense model in the same rounds: speeds of different minutes differ."""
    dense = done[0]["measures"]
    base, text = dense["speed"][f"{kind}_tokens_per_second"], shorten(dense["texts"][0]["text"], 18)

    def draw() -> Figure:
        figure, axes = panel(f"perplexity against {kind} speed")
        perplexities = [_value(row) for row in done]
        axes.plot(
            [1.0], perplexities[:1], color="0.5", marker="*", markersize=11, linestyle="none", label="dense", zorder=1
        )
        for label, look in styles.items():
            mine = [row for row in done[1:] if row["label"] == label]
            points = sorted((r["sparsity"], r["measures"]["speed"][f"{kind}_ratio"], _value(r)) for r in mine)
            if mine:
                axes.plot([x for _, x, _ in points], [y for *_, y in points], label=shorten(label), **look)
        axes.set_xlabel(f"{kind} speed (× dense, in turns with it)")
        above = axes.secondary_xaxis("top", functions=(lambda x: x * base, lambda x: x / base))
        above.set_xlabel("tokens/s (ratio × median of the dense model)", fontsize=8)
        above.tick_params(labelsize=8)
        above.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_ylabel(f"perplexity, {text}{scale(axes, perplexities)}")
        return legend(figure, axes)

    return Picture(f"speed-{kind}", f"Perplexity against {kind} speed", "results", draw)


def _radar(tasks: list[str], sparsity: float, done: list[dict], styles: dict) -> Picture:
    """Accuracy on every task, all methods at one sparsity."""
    angles = [2 * math.pi * i / len(tasks) for i in range(len(tasks))]

    def draw() -> Figure:
        figure, axes = panel(f"accuracy (%) at sparsity {sparsity:g}", HEIGHT + 0.7, projection="polar")
        for row in [done[0], *(row for row in done[1:] if row["sparsity"] == sparsity)]:
            look = styles.get(row["label"], {"color": "0.5", "linestyle": ":"})
            found = tasks_of(row)
            values = [100 * found[task]["acc"] for task in tasks]
            axes.plot([*angles, angles[0]], [*values, values[0]], label=shorten(row["label"]), **look)
        axes.set_xticks(angles, tasks)
        axes.set_ylim(0, 100)
        axes.set_rlabel_position(180 / len(tasks))  # between two tasks
        return legend(figure, axes)

    return Picture(f"tasks-{sparsity:g}", f"Accuracy on the tasks at sparsity {sparsity:g}", "results", draw)


def panel(title: str, height: float = HEIGHT, count: int = 1, **options) -> tuple[Figure, Any]:
    """A figure with ``count`` panels under each other; the axes of the one, or a list."""
    figure = Figure(figsize=(WIDTH, height * count), layout="constrained")
    figure.suptitle("\n".join(map(shorten, title.split("\n"))), fontsize=9.5)
    axes = figure.subplots(count, 1, squeeze=False, sharex=count > 1, subplot_kw=options)[:, 0]
    for one in axes:
        one.grid(True, alpha=0.3, linewidth=0.6)
        if not options:
            one.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    return figure, axes[0] if count == 1 else list(axes)


def scale(axes: Axes, values: list[float]) -> str:
    """A logarithmic scale where the values span much, with plain numbers at the ticks; what the label says of it."""
    ratio = max(values) / min(values)
    if ratio < WIDE:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if ratio < 300 else (1,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    return " (log scale)" if ratio >= WIDE else ""


def tick(value: float) -> str:
    """A number at an axis: whole with commas from a thousand on, a power of ten where that would be long."""
    return f"{value:.4g}" if value < 1e3 else f"{value:,.0f}" if value < 1e6 else f"{value:.0e}"


def legend(figure: Figure, axes: Axes) -> Figure:
    """Names of the curves below, where they cover nothing; the figure grows with them."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 1 if max(map(len, labels)) > 22 else 2 if max(map(len, labels)) > 12 else 3
    figure.set_figheight(figure.get_figheight() + LINE * max(0, math.ceil(len(labels) / columns) - 2))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)
    return figure


def shorten(text: str, length: int = 54) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _look() -> Any:
    """Return the settings of all pictures, for dark ink on light paper."""
    ink, paper = INKS["light"]
    return matplotlib.rc_context(
        {
            "font.size": 10,
            "axes.labelsize": 9.5,
            "lines.linewidth": 1.6,
            "lines.markersize": 5,
            "text.parse_math": False,  # a $ in a name is a $
            "svg.hashsalt": "rankfold",
            "figure.facecolor": paper,
            "savefig.facecolor": paper,
            "axes.facecolor": paper,
            **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), ink),
        }
    )


class DrawnPicture(NamedTuple):
    """A picture in all its forms; letters in SVG are outlines, so that it looks alike everywhere."""

    picture: Picture
    png: bytes
    svg: str
    dark: str  # SVG on dark paper


def drawn(picture: Picture, width: float = WIDTH) -> DrawnPicture:
    """Draw a picture, so many inches wide; on dark paper it has the colours of ink and paper exchanged."""
    with _look():
        figure = picture.draw()
        figure.set_figwidth(width)
        png = _saved(figure, "png", dpi=DPI)
        figure.set_layout_engine("none")  # everything has its place now: finding it takes most of the time
        svg = dark = _saved(figure, "svg").decode()
    for light, other in zip(INKS["light"], INKS["dark"], strict=True):
        dark = dark.replace(light, other)
    return DrawnPicture(picture, png, svg, dark)


def _saved(figure: Figure, form: str, **options) -> bytes:
    stream = io.BytesIO()
    nameless = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
    figure.savefig(stream, format=form, metadata=nameless, **options)
    return stream.getvalue()


def write_pictures(found: list[DrawnPicture], folder: Path) -> None:
    """Every picture as PNG and SVG; what else of that kind is in the folder goes."""
    folder.mkdir(exist_ok=True)
    for picture, png, svg, _ in found:
        write_bytes(folder / f"{picture.name}.png", png)
        write_text(folder / f"{picture.name}.svg", svg)
    for path in folder.iterdir():
        if path.suffix in (".png", ".svg") and path.stem not in {one.picture.name for one in found}:
            path.unlink()
