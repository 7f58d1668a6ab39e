"""The model card written beside the weights."""

import json
import shlex

from .outcomes import kinds_in, ratio_text, remark_on, trained_on, warnings_of
from .record import records_of

__all__ = ["measured_on", "model_card"]

_CARD = """---
library_name: transformers
base_model: {base}
tags:
- rankfold
- compressed
{tags}
---

# {title}

{base}{commit}, compressed by [rankfold](https://pypi.org/project/rankfold/) {version} with {methods}, {trained}.
{warnings}
| | dense | compressed | |
|---|---|---|---|
{counted}| parameters | {parameters:,} | {parameters_after:,} | |
| bytes of weights | {bytes:,} | {bytes_after:,} | |
| KV-cache bytes per token | {kv:,} | {kv_after:,} | |
{outcomes}
## Use

```python
{needs}from transformers import {auto}, {before}

model = {auto}.from_pretrained("{folder}")
{what} = {before}.from_pretrained("{folder}")
```

## How it was made

```
rankfold compress --config {config} -o {again}{recover}
```

{made} `rankfold.json` holds, for every module, its rank, the reconstruction
error that was measured, and the paper's bounds.
"""


EXAMPLES = "image-text examples"  # a kind of calibration
_NEEDS = "import rankfold  # or, where it is not installed: trust_remote_code=True\n"


def model_card(record: dict, folder: str, *, stock: bool = False, auto: str = "AutoModelForCausalLM") -> str:
    """README.md of a compressed checkpoint; deterministic, so that a resumed run writes the same bytes.

    Args:
        record: of the run (:func:`~.record.run_record`), of all parts of a model where several were compressed.
        folder: what the checkpoint is called.
        stock: transformers loads it without rankfold.
        auto: the Auto class that it is loaded with.
    """
    records = records_of(record)
    dense, done = records[0]["plan"], record["plan"]
    methods = list(dict.fromkeys(one["method"] for one in records))
    before, recovery = _processor(records), _training(record)
    return _CARD.format(
        base=record["base_model"],
        commit=f" at revision `{record['revision']}`" if "revision" in record else "",
        needs="" if stock else _NEEDS,
        auto=auto,
        before=before,
        what="tokenizer" if before == "AutoTokenizer" else "processor",
        title=folder,
        folder=folder,
        version=record["rankfold_version"],
        tags="\n".join(f"- {method}" for method in methods),
        methods=" and ".join(f"method `{method}`" for method in methods),
        trained=f"then {trained_on(recovery)}" if recovery else "without training",
        counted="".join(_counted(one, _of(one, records)) for one in records),
        parameters=dense["parameters"],
        parameters_after=done["parameters_after"],
        bytes=dense["bytes"],
        bytes_after=done["bytes_after"],
        kv=done["kv_bytes_per_token"],
        kv_after=done["kv_bytes_per_token_after"],
        warnings="".join(_warning(one, _prefix(one, records)) for one in records),
        outcomes="".join(_outcomes(one, _of(one, records)) for one in records) + _recovered(recovery),
        config=shlex.quote(f"{folder}/rankfold.json"),
        again=shlex.quote(f"{folder}-again"),
        recover=_recover_command(recovery, folder) if recovery else "",
        made="\n\n".join(_made(one, _of(one, records)) for one in records),
    )


def _processor(records: list[dict]) -> str:
    """The Auto class of what makes the model's inputs."""
    if len(records) > 1:
        return "AutoProcessor"
    kind = records[0]["calibration"].get("kind")
    return {"images": "AutoImageProcessor", EXAMPLES: "AutoProcessor"}.get(kind, "AutoTokenizer")


def _of(record: dict, records: list[dict]) -> str:
    """Which part a line is about, where the card is about two."""
    return f" of {record['plan']['part']}" if len(records) > 1 else ""


def _counted(record: dict, of: str) -> str:
    """A row of the table."""
    plan = record["plan"]
    what = "linear weights of the blocks" if plan["method"]["scope"] == "blocks" else "whole model"
    gone = "set to zero, which stay in the file" if "zeros" in plan["facts"] else "removed"
    counted, after = plan["counted_weights"], plan["counted_weights"] - plan["removed_weights"]
    return f"| counted weights{of} ({what}) | {counted:,} | {after:,} | {plan['sparsity']:.2%} {gone} |\n"


def _prefix(record: dict, records: list[dict]) -> str:
    """Return what a warning is about, where that is not the model as it is."""
    part = f"{record['plan']['part']}: " if len(records) > 1 else ""
    return f"{part}before training: " if _training(record) else part


def _training(record: dict) -> dict | None:
    """Return what a record says of training; ``None`` where the weights are those before it."""
    found = record.get("recovery")
    return found if found and found["recovered"] else None


def _warning(record: dict, part: str) -> str:
    return "".join(f"\n> **{part}{warning}.**\n" for warning in warnings_of(record))


def _made(record: dict, of: str) -> str:
    """Calibration and options, for one part."""
    calibration = record["calibration"]
    options = {k: v for k, v in record["plan"]["method"].items() if v is not None and k != "method"}
    return (
        f"Calibration{of}: {measured_on(calibration)} of `{calibration['source']}` (seed {calibration['seed']}, sha256 "
        f"{calibration['sha256']}). Options{of}: `{json.dumps(options)}`."
    )


def measured_on(calibration: dict) -> str:
    """How much of what was calibrated on."""
    kind = calibration.get("kind")
    if kind == EXAMPLES:
        return f"{calibration['num_samples']} {kind} of {calibration['tokens']} tokens"
    return f"{calibration['num_samples']} x {calibration['max_length']} {'patches' if kind == 'images' else 'tokens'}"


def _outcomes(record: dict, of: str) -> str:
    """Rows of the table."""
    of += " before training" if _training(record) else ""
    return _outcome(record["held_out"], record["calibration"], of) + "".join(
        f"| perplexity{of}, {kind} | {facts['perplexity_dense']:.2f} | {facts['perplexity']:.2f} | x {ratio_text(facts)} on "
        f"{facts['passages']} probe texts{remark_on(facts)} |\n"
        for kind, facts in kinds_in(record.get("probe_texts")).items()
    )


def _recovered(recovery: dict | None) -> str:
    """Return a row of the table for every text that was held out of training."""
    held_out = recovery["held_out"] if recovery else {}
    return "".join(
        f"| perplexity, {text} | {facts['perplexity_dense']:.2f} | {facts['perplexity']:.2f} | "
        f"{facts['perplexity_before']:.2f} before training, on {facts['sequences']} sequences that were held out |\n"
        for text, facts in held_out.items()
    )


def _recover_command(recovery: dict, folder: str) -> str:
    """Return the line that trains alike; of the texts only the proportions count."""
    options = {
        "tune": "tune",
        "loss": "loss",
        "tokens": "tokens_seen",
        "lr": "lr",
        "max-length": "length",
        "seed": "seed",
    }
    words = ["rankfold", "recover", f"{folder}-again", "-o", f"{folder}-recovered"]
    words += [word for flag, key in options.items() for word in (f"--{flag}", str(recovery[key]))]
    for text, facts in recovery["texts"].items():
        words += ["--calibration", f"{text}={facts['num_samples']}"]
    return "\n" + shlex.join(words)


def _outcome(held_out: dict | None, calibration: dict, of: str) -> str:
    """A row of the table."""
    if held_out is None:
        return f"| perplexity{of} | not measured | not measured | no calibration window was held out |\n"
    if "state_error" in held_out:
        error, cosine = held_out["state_error"], held_out["cosine"]
        samples = f"{held_out['windows']} calibration samples that were not fitted"
        return f"| cosine to the dense model's last states{of} | 1 | {cosine:.4f} | relative error {error:.3f} on {samples} |\n"
    dense, small = held_out["perplexity_dense"], held_out["perplexity"]
    what = EXAMPLES if calibration.get("kind") == EXAMPLES else f"calibration windows of {held_out['length']} tokens"
    behind = ", both behind the other compressed parts" if of.startswith(" of ") else ""
    windows = f"{held_out['windows']} {what} that were not fitted{behind}"
    return f"| perplexity{of} | {dense:.2f} | {small:.2f} | x {ratio_text(held_out)} on {windows} |\n"
