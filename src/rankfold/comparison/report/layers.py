"""Pictures of what happened to every block: how much it lost, the ranks, the errors. One set a method."""

from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .plots import HEIGHT, Picture, legend, panel, scale, slug

LOW = 1.9  # inches of a panel among others
COUNTED = 64  # blocks up to which each gets a marker


def layer_pictures(rows: list[dict]) -> list[Picture]:
    """Sparsity, ranks and errors by block for every method, of rows that are done, without the dense model."""
    found, sparsities = [], sorted({row["sparsity"] for row in rows})
    looks = {sparsity: _look(index, len(sparsities)) for index, sparsity in enumerate(sparsities)}
    for number, label in enumerate(dict.fromkeys(row["label"] for row in rows), 1):
        mine = sorted(
            (row for row in rows if row["label"] == label and row["modules"]), key=lambda row: row["sparsity"]
        )
        if mine:
            name = f"{number}-{slug(label)}"
            found.append(
                Picture(f"sparsity-{name}", "Sparsity of every block", label, lambda mine=mine: _sparsity(mine, looks))
            )
            found.append(Picture(f"rank-{name}", "Rank of every module", label, lambda mine=mine: _ranks(mine, looks)))
            if any(_errors(row, module) for row in mine for module in _names(mine)):
                draw = lambda mine=mine: _error(mine, looks)  # noqa: E731
                found.append(Picture(f"error-{name}", "Error of every module", label, draw))
    return found


def _names(rows: list[dict]) -> list[str]:
    """Modules in their order in a block."""
    return list(dict.fromkeys(module["module"] for row in rows for module in row["modules"]))


def _look(index: int, count: int) -> dict:
    """From the smallest sparsity of all methods to the largest as from dark to bright, on either paper."""
    place = 0.3 + 0.5 * index / max(1, count - 1)
    return {"color": colormaps["plasma"](place), "marker": "osD^v"[index % 5], "markersize": 4}


def _curve(axes: Axes, row: dict, blocks: list[int], values: list[float], looks: dict[float, dict]) -> None:
    look: dict[str, Any] = looks[row["sparsity"]] | ({"marker": None} if len(blocks) > COUNTED else {})
    axes.plot(blocks, values, label=f"sparsity {row['sparsity']:g}", **look)


def _sparsity(rows: list[dict], looks: dict[float, dict]) -> Figure:
    """MoDeGPT Fig. 6 and 8."""
    figure, axes = panel(f"sparsity of every block\n{rows[0]['label']}", HEIGHT - 0.4)
    for row in rows:
        blocks = sorted({module["block"] for module in row["modules"]})
        lost = []
        for block in blocks:
            mine = [module for module in row["modules"] if module["block"] == block]
            lost.append(100 - 100 * sum(m["weights"] for m in mine) / sum(m["dense_weights"] for m in mine))
        _curve(axes, row, blocks, lost, looks)
    axes.set(xlabel="block", ylabel="weights removed (%)")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return legend(figure, axes)


def _ranks(rows: list[dict], looks: dict[float, dict]) -> Figure:
    """MoDeGPT Fig. 10."""
    title = f"rank kept\n{rows[0]['label']}"
    return _by_module(rows, looks, title, _kept, lambda axes, module: axes.set(ylabel=f"{module} (%)", ylim=(0, 105)))


def _kept(row: dict, module: str) -> list[tuple[int, float]]:
    """Block and rank of a module, per cent of the dense one."""
    return [(m["block"], 100 * m["rank"] / m["of"]) for m in row["modules"] if m["module"] == module]


def _error(rows: list[dict], looks: dict[float, dict]) -> Figure:
    """On samples that were not fitted, where there are any."""
    where = (
        "held-out" if any(m["held_out_error"] is not None for row in rows for m in row["modules"]) else "calibration"
    )
    title = f"relative error, {where} samples\n{rows[0]['label']}"

    def finish(axes: Axes, module: str) -> None:
        values = [value for row in rows for _, value in _errors(row, module)]
        axes.set_ylabel(f"{module}{scale(axes, values).replace(' scale', '')}")

    return _by_module(rows, looks, title, _errors, finish)


def _errors(row: dict, module: str) -> list[tuple[int, float]]:
    """Block and relative error of a module, where it has one that a logarithm takes."""
    held_out = any(m["held_out_error"] is not None for m in row["modules"])
    key = "held_out_error" if held_out else "relative_error"
    found = [(m["block"], m[key]) for m in row["modules"] if m["module"] == module]
    return [(block, value) for block, value in found if value is not None and value > 0]


def _by_module(rows: list[dict], looks: dict[float, dict], title: str, values, finish) -> Figure:
    """A panel for every module, a curve for every sparsity; ``finish(axes, module)`` labels and scales it."""
    names = [name for name in _names(rows) if any(values(row, name) for row in rows)]
    figure, panels = panel(title, LOW, len(names))
    panels = panels if isinstance(panels, list) else [panels]
    for axes, name in zip(panels, names, strict=True):
        for row in rows:
            points = sorted(values(row, name))
            _curve(axes, row, [x for x, _ in points], [y for _, y in points], looks)
        finish(axes, name)
    panels[-1].set_xlabel("block")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return legend(figure, panels[-1])
