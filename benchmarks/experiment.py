"""Read an experiment: one YAML file in experiments/, what it extends, and the rows that its settings stand for."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from rankfold import make_method, plan
from rankfold.comparison import Cell, Form

HERE = Path(__file__).resolve().parent
DENSE = "dense"
NAMED, METRICS = (yaml.safe_load((HERE / f"{name}.yaml").read_text("utf-8")) for name in ("methods", "metrics"))
WHOLE = ("evaluation", "calibration")  # replaced, where a file extends another one and names its texts
OWN = (
    "sparsity",
    "modules",
    "mode",
    "calibration",
    "windows",
    "recover",
)  # what a setting may vary beside the options of its method


def read(name: str, changes: list[str] = ()) -> dict:
    """Return an experiment by name or path.

    Args:
        changes: ``key.key=value`` with YAML values, as of ``--set``.
    """
    path = Path(name) if name.endswith(".yaml") else HERE / "experiments" / f"{name}.yaml"
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "extends" in found:
        base = read(str(path.with_name(found.pop("extends") + ".yaml")))
        whole = {key: found[key] for key in WHOLE if key in found and (key != "calibration" or found[key].get("text"))}
        found = merged(base, found) | whole
    for change in changes:
        keys, _, value = change.partition("=")
        value = yaml.safe_load(value)
        for key in reversed(keys.split(".")):
            value = {key: value}
        found = merged(found, value)
    found["settings"] = found["settings"] + found.pop("also", [])
    return found | {"definitions": {key: text or METRICS[key] for key, text in found["definitions"].items()}}


def merged(below: dict, above: dict) -> dict:
    """Return ``below`` with what ``above`` says; objects key by key, all else replaced."""
    objects = [key for key in above if isinstance(above[key], dict) and isinstance(below.get(key), dict)]
    return below | above | {key: merged(below[key], above[key]) for key in objects}


@dataclass(frozen=True)
class Row:
    """One row of a record: a method with its options, and what it is calibrated on."""

    name: str
    labels: dict  # of the record: setting, sparsity, and what else the experiment names
    method: str
    options: dict
    mode: str | None = None  # None: parallel where the method can
    calibration: str | None = None
    windows: int | None = None  # of the calibration; None: all
    recovery: dict | None = None  # options of `rankfold.recover`, by which it is trained before it is measured
    as_wide: bool = False  # own rotary pairs at the widths of these options

    def cell(self, source) -> Cell:
        """Return what :class:`rankfold.comparison.CellRunner` runs."""
        method = make_method(self.method, **self.options)
        if self.mode is None:
            rest = {key: value for key, value in self.options.items() if key != "sparsity"}
            return Form(self.method, rest).at(method.sparsity)
        return Cell(self.name, widened(method, source) if self.as_wide else method, self.mode)


def widened(method, source):
    """Return the method with the widths that its ``head_dim`` gives, every key head with rotary pairs of its own."""
    dense, kept = {}, {}
    for module in plan(source, method=method).modules:
        dense[module.module] = dense.get(module.module, 0) + module.dense_weights
        kept[module.module] = kept.get(module.module, 0) + module.weights
    own = {name: 1 - kept[name] / dense[name] for name in dense}
    return replace(method, head_dim=0, modules=own)


def rows(experiment: dict) -> Iterator[Row]:
    """Yield the rows of all settings, in their order."""
    for block in experiment["settings"]:
        block = {"sparsity": experiment.get("sparsities"), "name": experiment.get("names")} | block
        axes = {key: labelled(key, block[key]) for key in ("name", "sparsity")} | {
            key: labelled(key, values) for key, values in block.get("vary", {}).items()
        }
        for chosen in itertools.product(*(axis.items() for axis in axes.values())):
            row = _row(experiment, block, dict(zip(axes, chosen, strict=True)))
            if row.labels["sparsity"] in experiment.get("at", [row.labels["sparsity"]]):
                yield row


def labelled(key: str, values) -> dict[str, dict]:
    """Return label -> what it sets; a plain value is its own label."""
    if isinstance(values, dict):
        return {label: value if isinstance(value, dict) else {key: value} for label, value in values.items()}
    listed = values if isinstance(values, list) else [values]
    return {value if key == "sparsity" else str(value): {key: value} for value in listed}


def _row(experiment: dict, block: dict, chosen: dict) -> Row:
    words = {axis: label for axis, (label, _) in chosen.items()}
    facts = functools.reduce(merged, (found for _, found in chosen.values()), {})
    method, options = of_name(str(facts.pop("name")))
    own = {key: facts.pop(key, block.get(key)) for key in OWN}
    options = options | block.get("options", {}) | facts
    if isinstance(own["modules"], list):  # these alone, each by the sparsity of its own weights
        options["modules"] = dict.fromkeys(own["modules"], own["sparsity"])
    else:
        options |= {"sparsity": own["sparsity"]} | ({"modules": own["modules"]} if own["modules"] else {})
    words |= {"study": block.get("study"), "calibration": own["calibration"]}
    words["setting"] = block.get("setting", "{name}").format(**words)
    words["value"] = block.get("value", "").format(**words)
    name = experiment.get("row", "{setting} {sparsity}").format(**words)
    labels = {key: words[key] for key in ("setting", "sparsity", "study", "value", "calibration") if words[key]}
    mode = own["mode"] or experiment.get("mode", "sequential")
    mode = None if mode == "best" else mode
    # What all rows of an experiment are trained by, what a block adds, and what the row itself varies.
    recovery = own["recover"] and experiment.get("recover", {}) | block.get("recover", {}) | own["recover"]
    wide = block.get("as_wide", False)
    return Row(name, labels, method, options, mode, own["calibration"], own["windows"], recovery, wide)


def of_name(name: str) -> tuple[str, dict]:
    """Return method and options: ``modegpt qk=cr``, ``modegpt:gqa=paper,ridge=0.1``, or one of methods.yaml."""
    if name in NAMED:
        given = NAMED[name].get("options", {})
        return NAMED[name]["method"], {key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}
    method, *given = name.replace(":", " ", 1).replace(",", " ").split()
    return method, {key: yaml.safe_load(value) for key, _, value in (item.partition("=") for item in given)}
