"""The model card written beside the weights."""

import json
import shlex
from typing import Any

from huggingface_hub import ModelCardData

from .._utils.hub_id import is_hub_id
from .._utils.sizes import plural
from .goal import asked_and_got
from .outcomes import (
    before_training,
    held_out_row,
    kind_rows,
    size_rows,
    trained_on,
    trainings_of,
    warnings_of,
)
from .record import records_of

_CARD = """{metadata}
# {title}

{base}{commit}, compressed by [rankfold](https://pypi.org/project/rankfold/) {version} with {methods}, {trained}.
{warnings}
| | dense | compressed | |
|---|---|---|---|
{table}
## Use

```python
{needs}from transformers import {auto}, {before}

model = {auto}.from_pretrained("{folder}")
{what} = {before}.from_pretrained("{folder}")
```

## How it was made

```
{commands}
```

{made} `rankfold.json` holds, for every module, its rank, the reconstruction
error that was measured, and the paper's bounds.
"""


_OF_HUB = (
    "rankfold compress --config {config} -o {again}",
    "rankfold recover {again} --config {config} -o {out}",
)
_OF_LOCAL = (  # of which there is the name of the folder only
    "rankfold compress {base} --config {config} -o {again}",
    "rankfold recover {again} --teacher {base} --config {config} -o {out}",
)
EXAMPLES = "image-text examples"  # a kind of calibration
_TASKS = {  # of an Auto class, as the hub lists models by
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
}
_NEEDS = "import rankfold  # or, where it is not installed: trust_remote_code=True\n"

Record = dict[str, Any]


def model_card(record: Record, folder: str, *, stock: bool = False, auto: str = "AutoModelForCausalLM") -> str:
    """README.md of a compressed checkpoint; deterministic, so that a resumed run writes the same bytes.

    Args:
        record: of the run (:func:`~.record.run_record`), of all components of a model where several were compressed.
        folder: what the checkpoint is called.
        stock: transformers loads it without rankfold.
        auto: the Auto class that it is loaded with.
    """
    records = records_of(record)
    # Where there are several components, what a line is about.
    components = {str(one["plan"]["part"]): one for one in records} if len(records) > 1 else {"": record}
    methods = list(dict.fromkeys(one["method"] for one in records))
    before, trained = _processor(records), trainings_of(record)
    rows = [_counted(one, part) for part, one in components.items()]
    # Components shrink the model one after the other; a cache is that of the last one alone.
    rows += size_rows(record["plan"] | {key: records[0]["plan"][key] for key in ("parameters", "bytes")})
    rows += [row for part, one in components.items() for row in _outcomes(one, part)] + _trained_rows(trained)
    return _CARD.format(
        metadata=card_metadata(record["base_model"], [name for name in methods if name != "rankfold"], auto=auto),
        base=record["base_model"],
        commit=f" at revision `{record['revision']}`" if "revision" in record else "",
        needs="" if stock else _NEEDS,
        auto=auto,
        before=before,
        what="tokenizer" if before == "AutoTokenizer" else "processor",
        title=folder,
        folder=folder,
        version=record["rankfold_version"],
        methods=" and ".join(f"method `{method}`" for method in methods),
        trained=", ".join(f"then {trained_on(one)}" for one in trained) or "without training",
        table="".join(f"| {' | '.join(row)} |\n" for row in rows),
        warnings="".join(
            f"\n> **{part and f'{part}: '}{warning}.**\n"
            for part, one in components.items()
            for warning in warnings_of(one)
        ),
        commands="\n".join(_commands(record, folder)),
        made="\n\n".join(_made(one, _of(part)) for part, one in components.items()),
    )


def card_metadata(base: str, methods: list[str], *, auto: str) -> str:
    """Return the YAML block that a card begins with, which the hub lists a model by.

    Args:
        base: the dense model; left out where it has no id on the hub, which refuses other names.
        methods: further tags.
        auto: the Auto class that the model is loaded with.
    """
    known = ModelCardData(
        base_model=base if is_hub_id(base) else None,
        library_name="transformers",
        pipeline_tag=_TASKS.get(auto),
        tags=["rankfold", "compressed", *methods],
    )
    return f"---\n{known.to_yaml()}\n---\n"


def _processor(records: list[Record]) -> str:
    """Return the Auto class of what makes the model's inputs."""
    if len(records) > 1:
        return "AutoProcessor"
    kind = records[0]["calibration"].get("kind")
    return {"images": "AutoImageProcessor", EXAMPLES: "AutoProcessor"}.get(kind, "AutoTokenizer")


def _of(part: str) -> str:
    return part and f" of {part}"


def _counted(record: Record, part: str) -> tuple[str, ...]:
    plan = record["plan"]
    what = "linear weights of the blocks" if plan["method"]["scope"] == "blocks" else "whole model"
    removed = "set to zero, which stay in the file" if "zeros" in plan["facts"] else "removed"
    counted, after = plan["counted_weights"], plan["counted_weights"] - plan["removed_weights"]
    name = f"counted weights{_of(part)} ({what})"
    return name, f"{counted:,}", f"{after:,}", f"{plan['sparsity']:.2%} {removed}"


def _made(record: Record, of: str) -> str:
    """Return calibration and options of one component."""
    calibration = record["calibration"]
    options = {k: v for k, v in record["plan"]["method"].items() if v is not None and k != "method"}
    goal = asked_and_got(record)
    return (f"{goal[0].upper()}{goal[1:]}.\n\n" if goal else "") + (
        f"Calibration{of}: {measured_on(calibration)} of `{calibration['source']}` (seed {calibration['seed']}, sha256 "
        f"{calibration['sha256']}). Options{of}: `{json.dumps(options)}`."
    )


def measured_on(calibration: Record) -> str:
    """Return how many samples a model was calibrated on, and how long they are."""
    kind = calibration.get("kind")
    if kind == EXAMPLES:
        return (
            f"{plural(calibration['num_samples'], kind.removesuffix('s'))} of {plural(calibration['tokens'], 'token')}"
        )
    return f"{calibration['num_samples']} x {calibration['max_length']} {'patches' if kind == 'images' else 'tokens'}"


def _outcomes(record: Record, part: str) -> list[tuple[str, ...]]:
    of_held_out, of_probes = (
        f"{_of(part)} {before_training(record, name)}".rstrip() for name in ("held_out", "probe_texts")
    )
    row = ("perplexity", "not measured", "not measured", "no calibration sample was held out")
    if held_out := record.get("held_out"):
        *row, where = held_out_row(held_out)
        both = ", both after the other compressed components" if part and "perplexity" in held_out else ""
        row = (*row, where + both)
    kinds = kind_rows(record.get("probe_texts"))
    found = [(f"{row[0]}{of_held_out}", *row[1:])]
    return found + [(f"perplexity{of_probes}, {kind}", *numbers) for kind, *numbers in kinds]


def _trained_rows(trained: list[Record]) -> list[tuple[str, ...]]:
    """Return a row for every text that was held out of the last training."""
    return [
        (
            f"perplexity, {text}",
            f"{facts['perplexity_dense']:.2f}",
            f"{facts['perplexity']:.2f}",
            f"{facts['perplexity_before']:.2f} before training, on {plural(facts['sequences'], 'held-out sequence')}",
        )
        for training in trained[-1:]
        for text, facts in training["held_out"].items()
    ]


def _commands(record: Record, folder: str) -> list[str]:
    """Return the lines that make it again."""
    lines = _OF_HUB if is_hub_id(record["base_model"]) else _OF_LOCAL
    trained = trainings_of(record)
    names = {"base": record["base_model"], "again": f"{folder}-again", "out": f"{folder}-recovered"}
    quoted = {key: shlex.quote(name) for key, name in (names | {"config": f"{folder}/rankfold.json"}).items()}
    # A record repeats its last training alone.
    repeats = len(trained) == 1 and trained[0] is record["recovery"]
    note = (
        [f"# then {plural(len(trained), 'training')}, with the options in rankfold.json"]
        if trained and not repeats
        else []
    )
    return [line.format(**quoted) for line in lines[: 1 + repeats]] + note
