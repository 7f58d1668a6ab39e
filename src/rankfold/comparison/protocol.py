"""The rules of a comparison that others made: what is calibrated on and measured, and the one number it is summed up
by.

Each protocol is a file of data in the folder ``protocols``. What a run does otherwise is a departure from it, and the
report names each.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OptionError, check_choice, method_option, option

FOLDER = Path(__file__).parent / "protocols"


@dataclass(frozen=True)
class Protocol:
    """What a protocol fixes.

    Attributes:
        name: of its file.
        title: how its authors call it.  source: where its rules are written.
        methods: run where none are named.
        keep: fractions of the parameters of the whole model that stay.
        calibration: text, samples and tokens of each.
        texts: name -> the most windows of it; 0 for all.  text_length: tokens of a window.
        tasks: name -> examples before each question.
        metric: of a task; ``acc`` where a task lacks it.
        means: name -> tasks whose mean accuracy is one term of the retention, beside the perplexity of each text.
    """

    name: str
    title: str
    source: str
    methods: str
    keep: tuple[float, ...]
    calibration: Mapping[str, Any]
    texts: Mapping[str, int]
    text_length: int
    tasks: Mapping[str, int]
    metric: str
    means: Mapping[str, tuple[str, ...]]

    @property
    def sparsities(self) -> tuple[float, ...]:
        """Return what is removed of the whole model."""
        return tuple(round(1 - kept, 9) for kept in self.keep)

    @property
    def terms(self) -> int:
        """Count the terms of the retention."""
        return len(self.texts) + len(self.means)

    def settings(self) -> dict[str, Any]:
        """Return the options of ``rankfold compare`` that it fixes."""
        return {
            "methods": self.methods,
            "sparsities": ",".join(map(str, self.sparsities)),
            "calibration": [self.calibration["text"]],
            "num_samples": self.calibration["num_samples"],
            "max_length": self.calibration["max_length"],
            "text": list(self.texts),
            "text_length": self.text_length,
            "tasks": ",".join(self._task(name) for name in self.tasks),
        }

    def _task(self, name: str) -> str:
        return f"{name}:{self.tasks[name]}" if self.tasks[name] else name

    def check(self, sparsities: Iterable[float], options: Iterable[Mapping[str, Any]]) -> None:
        """Raise :class:`OptionError` for a sparsity that the protocol does not have, and for what a sparsity counts.

        Args:
            options: those given to each method.
        """
        for name, value in ((name, value) for given in options for name, value in given.items()):
            if name in ("scope", "budget") or (name == "modules" and isinstance(value, Mapping)):
                raise OptionError(
                    f"protocol {self.name} counts the parameters of the whole model, got {method_option(name, value)}; "
                    f"{'name the modules alone' if name == 'modules' else 'leave it out'}, or leave out the protocol"
                )
        others = [value for value in sparsities if value not in self.sparsities]
        if others:
            raise OptionError(
                f"protocol {self.name} keeps {_listed(self.keep)} of the model, so {option('sparsities')} takes "
                f"{_listed(self.sparsities)} or some of these, got {_listed(others)}; leave it out, or the protocol"
            )

    def departures(
        self, calibration: Mapping[str, Any], measures: Mapping[str, Any], left_out: Iterable[str] = ()
    ) -> list[str]:
        """Name everything that a run does otherwise; nothing where it keeps to the protocol.

        Args:
            calibration: :meth:`.CalibrationData.describe`.
            measures: :meth:`.Measures.describe`.
            left_out: tasks of the protocol that were asked for and cannot be run.
        """
        own, texts, run = self.calibration, measures["texts"], measures.get("tasks", {})
        pairs = [
            ("calibration text", calibration["source"], own["text"]),
            ("calibration samples", calibration["num_samples"], own["num_samples"]),
            ("tokens of a sample", calibration["max_length"], own["max_length"]),
            ("texts", _listed(text["text"] for text in texts), _listed(self.texts)),
            ("tokens of an evaluation sample", texts[0]["length"], self.text_length),
            *(
                (f"samples of {text['text']}", _limit(text["limit"]), _limit(self.texts.get(text["text"])))
                for text in texts
            ),
            ("questions of a task", _limit(run.get("limit")), "all"),
            (
                "tasks",
                _listed(sorted([*run.get("tasks", ()), *left_out])),
                _listed(sorted(map(self._task, self.tasks))),
            ),
        ]
        return [f"{what} {got or 'none'} in place of {wanted}" for what, got, wanted in pairs if got != wanted]

    def retention(self, row: Mapping[str, Any], dense: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is kept of the dense model's quality.

        Args:
            row, dense: rows of a comparison, with the same measures.

        Returns:
            ``terms``: perplexity of the dense model over that of the row for each text, accuracy of the row over that
            of the dense model for each mean of tasks, left out where none of its tasks was run or the dense model has
            none right; ``retention``: the mean of these; ``means``: accuracies of several tasks; ``kept``: share of the
            parameters; ``tasks``: accuracy and standard error of each by the protocol's metric.
        """
        texts = zip(row["measures"]["texts"], dense["measures"]["texts"], strict=True)
        terms = {text["text"]: before["perplexity"] / text["perplexity"] for text, before in texts}
        means = {}
        for name, tasks in self.means.items():
            pairs = [
                [self._accuracy(r["measures"].get("tasks", {}).get(task, {}))["acc"] for r in (row, dense)]
                for task in tasks
            ]
            known = [(own, before) for own, before in pairs if own is not None and before is not None]
            if known:
                mean, before = (sum(side) / len(known) for side in zip(*known, strict=True))
                terms |= {name: mean / before} if before else {}
                means |= {name: mean} if len(tasks) > 1 else {}
        kept = row["counts"]["parameters"] / dense["counts"]["parameters"]
        retention = sum(terms.values()) / len(terms)
        tasks = {name: self._accuracy(facts) for name, facts in row["measures"].get("tasks", {}).items()}
        return {"kept": kept, "tasks": tasks, "means": means, "terms": terms, "retention": retention}

    def _accuracy(self, task: Mapping[str, Any]) -> dict[str, float | None]:
        """Return the accuracy of a task by the protocol's metric, and its standard error."""
        metric = self.metric if self.metric in task else "acc"
        return {"acc": task.get(metric), "acc_stderr": task.get(f"{metric}_stderr")}


@dataclass(frozen=True)
class Rules:
    """A protocol, and what of it cannot be run here.

    Attributes:
        left_out: task -> why it is left out.
    """

    protocol: Protocol
    left_out: Mapping[str, str]

    def describe(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entry of the record: name, what is done otherwise, what is left out and why.

        Args:
            identity: of the comparison.
        """
        departures = self.protocol.departures(identity["calibration"], identity["measures"], self.left_out)
        return {"name": self.protocol.name, "departures": departures, "left_out": dict(self.left_out)}


def protocol_lines(described: Mapping[str, Any]) -> list[str]:
    """Return what a report says of the protocol it followed (:meth:`Rules.describe`), a sentence a line."""
    protocol = read_protocol(described["name"])
    departures = described["departures"]
    follows = f"Not by the protocol {protocol.title}" if departures else f"By the protocol {protocol.title}"
    lines = [f"{follows} ({protocol.source}){': ' + '; '.join(departures) if departures else ''}."]
    lines += [f"Left out: {task}, because {reason}." for task, reason in described["left_out"].items()]
    return lines


def _limit(limit: int | None) -> str:
    return str(limit) if limit else "all"


def _listed(values) -> str:
    return ", ".join(map(str, values))


def protocol_names() -> list[str]:
    """Return the names of all protocols."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_protocol(name: str) -> Protocol:
    """Return a protocol by its name.

    Raises:
        OptionError: there is none, with a suggestion.
    """
    check_choice("protocol", name, protocol_names())
    found: dict[str, Any] = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    lists: dict[str, Any] = {
        "keep": tuple(found["keep"]),
        "means": {key: tuple(value) for key, value in found["means"].items()},
    }
    return Protocol(name=name, **found | lists)
