"""`--config FILE`: repeat what a record holds. Options given on the command line override it."""

import logging
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .._utils.hub_id import is_hub_id
from .._utils.schema import NUMBER, Each, Maybe, check_record
from ..errors import written
from .options import MethodOptions, of_measurements, of_model

log = logging.getLogger(__name__)

# What a record must hold to be repeated, beside what the tables show.
NEEDED = {"dtype": str, "revision": Maybe(str), "calibration": {"seed": int}, "plan": {"method": {"method": str}}}
NEEDED_OF_RECOVERY = {
    **dict.fromkeys(("tune", "loss", "text_column"), str),
    **dict.fromkeys(("tokens", "rank", "batch_tokens", "length", "seed"), int),
    **{
        "lr": Maybe(NUMBER),
        "tolerance": NUMBER,
        "calibration": Each(NUMBER),
        "minutes": Maybe(NUMBER),
        "adapter": bool,
    },
}
# What a record has of its model and samples -> the options that ask for others.
REPLACED = {
    "fingerprint": {"revision", "component", "components"},
    "sha256": {"calibration", "num_samples", "max_length", "seed", "text_column", "moments"},
}
# Options that take the place of the size in bytes that a record has.
OTHER_SIZES = {"sparsity", "keep_quality", "components", "budget", "scope", "target"}
Settings = dict[str, Any]  # name of a parameter -> its value, as text until it is parsed


class Recorded(list[Settings]):
    """The settings of every component of a run, or of every command that filled the folder of a comparison."""


def _into_defaults(context: typer.Context, found: list[Settings]) -> Recorded:
    alone = len(found) == 1
    context.default_map = {name: value for name, value in found[0].items() if alone or name != "component"}
    return Recorded(found)


def _read_run(context: typer.Context, path: Path | None) -> Recorded | None:
    """Return the settings of every component that a run compressed."""
    if path is None or context.resilient_parsing:
        return None
    from ..report.record import read_record, records_of

    records = records_of(read_record(path))
    for record in records:
        check_record(record, NEEDED, path)
    if "recovery" in records[-1]:
        log.info(
            "%s: what is repeated is the compression; `rankfold recover --config` repeats the training after it", path
        )
    found = [_of_run(record) for record in records]
    if len(found) > 1:
        found[0]["components"] = ",".join(f"{one['component']}={one['sparsity']}" for one in found)
    return _into_defaults(context, found)


def _read_recovery(context: typer.Context, path: Path | None) -> Recorded | None:
    """Return the settings of the training that made a model."""
    if path is None or context.resilient_parsing:
        return None
    from .._utils.files import read_json

    # Of a model that nobody compressed it holds the training alone, so `read_record` would refuse it.
    record = read_json(path)
    check_record(record, {"recovery": NEEDED_OF_RECOVERY}, path)
    return _into_defaults(context, [_of_recovery(record["recovery"])])


def _read_comparison(context: typer.Context, path: Path | None) -> Recorded | None:
    """Return the settings of every command that filled the folder of a comparison."""
    if path is None or context.resilient_parsing:
        return None
    from ..comparison.folder import read_config

    config = read_config(path)
    shared = _of_comparison(config["identity"])
    runs = [{key: ",".join(map(str, run[key])) for key in ("methods", "sparsities")} for run in config["runs"]]
    return _into_defaults(context, [shared | run for run in runs])


def _read_protocol(context: typer.Context, name: str | None) -> str | None:
    """Let the options that a protocol fixes be the defaults; those of a comparison to repeat go before them."""
    if name is None or context.resilient_parsing:
        return None
    from ..comparison.protocol import read_protocol

    context.default_map = read_protocol(name).settings() | dict(context.default_map or {})
    return name


_record_of = partial(of_model, parser=Path, metavar="<path>", is_eager=True)
Run = Annotated[
    Recorded | None,
    _record_of(callback=_read_run, help="rankfold.json of a run to repeat; options given here override it."),
]
Recovery = Annotated[
    Recorded | None,
    _record_of(callback=_read_recovery, help="rankfold.json of a training to repeat; options given here override it."),
]
Comparison = Annotated[
    Recorded | None,
    _record_of(
        callback=_read_comparison, help="compare.json of a comparison to repeat; options given here override it."
    ),
]
ProtocolName = Annotated[
    str | None,
    of_measurements(
        callback=_read_protocol,
        is_eager=True,
        help="lowrankarena: texts, tasks, calibration, sizes by its rules. Options given here override it; "
        "the report says so.",
    ),
]


def remaining(context: typer.Context, settings: Settings, given: set[str]) -> Settings:
    """Return what a record decides in addition to the options given, with the types of the parameters.

    A method other than the record's takes none of its options.
    """
    values = context.params
    left = {
        parameter.name: parameter.process_value(context, settings[parameter.name])
        for parameter in context.command.params
        if parameter.name in settings and parameter.name not in given
    }
    if "target_size" in settings and given & OTHER_SIZES:
        left["target_size"] = None
    if "recorded" in settings:
        left["recorded"] = {key: value for key, value in settings["recorded"].items() if not given & REPLACED[key]}
    if "settings" not in values:
        return left
    if "method" in given and values["method"] != settings["method"]:
        return left | {name: values[name] if name in given else None for name in ("settings", "allocation")}
    mine = values["settings"] if "settings" in given else []
    keys = {item.partition("=")[0] for item in mine}
    kept = [item for item in settings["settings"] if item.partition("=")[0] not in keys]
    return left | {"settings": [*kept, *mine]}


def _of_run(record: Settings) -> Settings:
    flags = {field.name for field in fields(MethodOptions)}
    method = {key: written(value) for key, value in record["plan"]["method"].items() if value is not None}
    return {
        **_of_base(record),
        **_of_calibration(record["calibration"]),
        **{key: value for key, value in method.items() if key in flags},
        "settings": [f"{key}={value}" for key, value in method.items() if key not in flags],
        **_of_goal(record.get("goal") or {}),
        "mode": record["mode"],
        "recorded": {"fingerprint": record.get("fingerprint"), "sha256": record["calibration"].get("sha256")},
        **({"component": record["plan"]["part"]} if record["plan"].get("part") else {}),
    }


def _of_goal(goal: Settings) -> Settings:
    """Name the size in bytes that was asked for; a kept quality is repeated by the sparsity that was found for it."""
    if goal.get("option") != "target_size":
        return {}
    size, dtype = str(goal["asked"]), goal.get("dtype")
    return {"target_size": f"{size}:{dtype}" if dtype else size}


def _of_recovery(facts: Settings) -> Settings:
    """Name what a training was asked for; the models are given anew, as a record has their names only.

    What was trained for some minutes is repeated with as many steps: its record has the tokens that they take.
    """
    is_blockwise = facts.get("blockwise", False)
    asked = ("tune", "tokens", "rank", "lr", "batch_tokens", "tolerance", "adapter", "seed", "text_column")
    values = {
        **{key: facts[key] for key in asked},
        "loss": "kl" if is_blockwise else facts["loss"],  # the option has no effect there, and stays as by default
        "max_length": facts["length"],
        "blockwise": is_blockwise,
        "calibration": [f"{text}={share}" for text, share in facts["calibration"].items()],
    }
    return {key: value for key, value in values.items() if value is not None}


def _of_comparison(identity: Settings) -> Settings:
    measures = identity["measures"]
    first, tasks, generation = measures["texts"][0], measures.get("tasks"), measures.get("generation", {})
    values = {
        "text_column": first.get("text_column"),
        **_of_base(identity),
        **_of_calibration(identity["calibration"]),
        "text": [text["text"] for text in measures["texts"]],
        "text_length": first["length"],
        "limit": _limit([tasks] if tasks else measures["texts"]),
        "tasks": tasks and ",".join(tasks["tasks"]),
        "include_path": (tasks or {}).get("folder") or generation.get("folder"),
        "generation": "generation" in measures,
        "speed": "speed" in measures,
        "protocol": identity.get("protocol", {}).get("name"),
    }
    return {key: value for key, value in values.items() if value is not None}


def _limit(measures: list[Settings]) -> int | None:
    """Return the limit that was given; of a text a protocol may have a smaller one of its own."""
    limits: list[int] = [limit for measure in measures if (limit := measure.get("limit"))]
    return max(limits) if len(limits) == len(measures) else None


def _of_base(facts: Settings) -> Settings:
    """Name the dense model, one from the hub with the commit it was read at, and the precision written.

    Of a local model the record has the name without its folder, so MODEL has to be given where it is not here.
    """
    name = f"{facts['base_model']}@{facts['revision']}" if "revision" in facts else facts["base_model"]
    is_known = is_hub_id(facts["base_model"]) or Path(name).exists()
    return {**({"model": name} if is_known else {}), "dtype": facts["dtype"]}


def _of_calibration(calibration: Settings) -> Settings:
    texts = calibration.get("texts", [calibration])
    is_even = len({text.get("share") for text in texts}) == 1
    values = {
        "calibration": [text["source"] if is_even else f"{text['source']}={text['share']}" for text in texts],
        "num_samples": calibration.get("num_samples_wanted", calibration["num_samples"]),
        "max_length": None if calibration.get("kind") else calibration["max_length"],  # other kinds are not cut
        "seed": calibration["seed"],
        "text_column": calibration.get("text_column"),
        "shards": calibration.get("shards"),
    }
    return {key: value for key, value in values.items() if value is not None}
