"""The command lines that make a checkpoint or a comparison again."""

import itertools
import shlex
from dataclasses import fields
from typing import NamedTuple

from ..errors import OptionError
from ..methods import NarrowingMethod, make_method, method_class
from ..methods.config import ignored_options

__all__ = ["compare_command", "option_text", "options_for_target", "records_of", "reproduce_command"]

HEADS = {"qk", "vo", "heads"}  # modules that such a target leaves dense
SHARED_OPTIONS = {f.name for f in fields(NarrowingMethod)}  # those with a flag of their own


def records_of(record: dict) -> list[dict]:
    """Records of the parts of a model that were compressed in one run, in their order; of any other run the record itself."""
    return [*records_of(record["before"]), record] if "before" in record else [record]


def options_for_target(record: dict, target: str) -> str | None:
    """Return the options that choose the ranks of a target; ``None`` where the method of a checkpoint has no such ranks.

    Args:
        record: of the run.
        target: one that leaves heads dense.
    """
    method = record["plan"]["method"]
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in method.items()}
    uniform = {"allocation": "uniform", "exclude_blocks": ()} if target == "stock" else {}
    try:
        make_method(options.pop("method"), **options | {"target": target} | uniform)
    except OptionError:
        return None
    if "before" in record or HEADS & {*(method["modules"] or ())} or method["target"] == target:
        return None
    flags = [*(["--allocation uniform"] if uniform else []), f"--for {target}"]
    return f"`{' '.join(flags)}`" + (" and without --exclude-blocks" if uniform and method["exclude_blocks"] else "")


class _Given(NamedTuple):
    """What a part of a model was given, as options of the command line."""

    part: str | None
    sparsity: float | None  # none where modules name their own
    method: list[str]
    calibration: list[str]
    draw: dict[str, int | str]  # option -> value; no length where nothing is cut, an unusual column
    written: list[str]


def reproduce_command(record: dict, folder: str) -> str:
    """The command line that makes this checkpoint; one for each part, one after the other, where no single one can say what
    each was given.

    Args:
        record: of the run (:func:`~.record.run_record`).
        folder: that it is written to.
    """
    model, given = _model(record), [_given(one) for one in records_of(record)]
    *before, last = given
    if not all(
        one.sparsity is not None
        and (one.part == "language" or "field" not in one.draw)  # beside --parts it is the column of the text
        and one.method == last.method
        and one.written == last.written
        and _drawn_alike(one.draw, last.draw)
        for one in before
    ):
        places = [model, *(f"{folder}-{one.part}" for one in before), folder]
        return "\n".join(_alone(*pair, one) for pair, one in zip(itertools.pairwise(places), given, strict=True))
    if not before:
        return _alone(model, folder, last)
    method = [*last.method, f"--parts {','.join(f'{one.part}={one.sparsity}' for one in given)}"]
    draw = dict(itertools.chain.from_iterable(one.draw.items() for one in given))
    return _command(model, folder, method, _texts_of_parts(given), draw, last.written)


def _given(record: dict) -> _Given:
    method, calibration, part = record["plan"]["method"], record["calibration"], record["plan"]["part"]
    written = [f"--mode {record['mode']}", f"--dtype {record['dtype']}"]
    sparsity = None if "sparsity" in ignored_options(method) else method["sparsity"]
    return _Given(part, sparsity, _method(method), _texts(calibration), _draw(calibration), written)


def _alone(model: str, folder: str, given: _Given) -> str:
    sparsity = [] if given.sparsity is None else [f"--sparsity {given.sparsity}"]
    method = [given.method[0], *sparsity, *given.method[1:]]
    written = [*given.written, *([f"--part {given.part}"] if given.part else [])]
    return _command(model, folder, method, given.calibration, given.draw, written)


def _command(
    model: str, folder: str, method: list[str], texts: list[str], draw: dict[str, int | str], rest: list[str]
) -> str:
    options = [*method, *_calibrated(texts, draw), *rest]
    return f"rankfold compress {shlex.quote(model)} -o {shlex.quote(folder)} " + " ".join(options)


def _method(method: dict) -> list[str]:
    """Its name, then what is not as by default; without the sparsity."""
    defaults, options = method_class(method["method"])().describe(), [f"--method {method['method']}"]
    left_out = {"method", "sparsity", *ignored_options(method)}
    for key, value in method.items():
        value = tuple(value) if isinstance(value, list) else value  # as JSON has it
        if key in left_out or value == defaults[key]:
            continue
        text, flag = option_text(value, ","), "for" if key == "target" else key
        options.append(f"--{flag.replace('_', '-')} {text}" if key in SHARED_OPTIONS else f"--option {key}={text}")
    return options


def option_text(value, comma: str) -> str:
    """The value of an option as the command line takes it; ``comma``: what stands between the items of a list."""
    if isinstance(value, dict):
        return comma.join(f"{k}={v}" for k, v in value.items())
    return comma.join(map(str, value)) if isinstance(value, list | tuple) else str(value).replace(",", comma)


def compare_command(identity: dict, run: dict, folder: str) -> str:
    """The command line that fills a folder with these rows.

    Args:
        identity: of the comparison (:func:`~.identity.comparison_identity`).
        run: ``{"methods": labels, "sparsities": numbers}``.
    """
    measures, windows = identity["measures"], identity["calibration"]
    first = measures["texts"][0]
    windows = {"field": first["field"]} | windows if "field" in first else windows
    options = [f"--methods {shlex.quote(','.join(run['methods']))}"]
    options += [f"--sparsities {','.join(map(str, run['sparsities']))}", *_calibrated(_texts(windows), _draw(windows))]
    options += [f"--text {shlex.quote(text['text'])}" for text in measures["texts"]]
    options += [f"--text-length {first['length']}"]
    options += [f"--limit {first['limit']}"] if first["limit"] else []
    if "tasks" in measures:
        folder_of_rows = measures["tasks"]["folder"]
        options += [f"--tasks {','.join(measures['tasks']['tasks'])}"]
        options += [f"--tasks-from {shlex.quote(folder_of_rows)}"] if folder_of_rows else []
    options += ["--speed"] if "speed" in measures else []
    return f"rankfold compare {shlex.quote(_model(identity))} -o {shlex.quote(folder)} " + " ".join(
        [*options, f"--dtype {identity['dtype']}"]
    )


def _model(facts: dict) -> str:
    """Name the dense model; one from the hub with the commit it was read at."""
    return f"{facts['base_model']}@{facts['revision']}" if "revision" in facts else facts["base_model"]


def _calibrated(texts: list[str], draw: dict[str, int | str]) -> list[str]:
    """Which windows were drawn."""
    return [
        *(f"--calibration {shlex.quote(text)}" for text in texts),
        *(f"--{name} {shlex.quote(str(value))}" for name, value in draw.items()),
    ]


def _draw(calibration: dict) -> dict[str, int | str]:
    column = {"field": calibration["field"]} if "field" in calibration else {}
    length = {} if calibration.get("kind") else {"length": calibration["length"]}
    return {
        "samples": calibration.get("samples_wanted", calibration["samples"]),
        **length,
        "seed": calibration["seed"],
        **column,
    }


def _drawn_alike(one: dict[str, int | str], other: dict[str, int | str]) -> bool:
    """Whether options that both take are equal."""
    return all(one[name] == other[name] for name in one.keys() & other.keys())


def _texts_of_parts(given: list[_Given]) -> list[str]:
    """One file for all parts, or what each of them was measured on."""
    first = given[0].calibration
    alike = all(one.calibration == first for one in given)
    return first if alike else [f"{one.part}={text}" for one in given for text in one.calibration]


def _texts(calibration: dict) -> list[str]:
    """Calibration texts as the command line takes them."""
    texts = calibration.get("texts", [calibration])
    if len({text.get("share") for text in texts}) == 1:
        return [text["source"] for text in texts]
    return [f"{text['source']}={text['share']}" for text in texts]
