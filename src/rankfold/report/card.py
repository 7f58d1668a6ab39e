"""The model card written beside the weights."""

import json
import shlex
from dataclasses import fields

from ..methods import Method, method_class

__all__ = ["compare_command", "model_card", "option_text", "reproduce_command"]

SHARED_OPTIONS = {f.name for f in fields(Method)}  # those with a flag of their own

_CARD = """---
library_name: transformers
base_model: {base}
tags:
- rankfold
- compressed
- {method}
---

# {title}

{base}, compressed by [rankfold](https://pypi.org/project/rankfold/) {version} with method `{method}`, without training.
{warning}
| | dense | compressed | |
|---|---|---|---|
| counted weights ({of}) | {counted:,} | {counted_after:,} | {sparsity:.2%} {gone} |
| parameters | {parameters:,} | {parameters_after:,} | |
| bytes of weights | {bytes:,} | {bytes_after:,} | |
| KV-cache bytes per token | {kv:,} | {kv_after:,} | |
{outcome}

## Use

```python
{needs}from transformers import {auto}, {before}

model = {auto}.from_pretrained("{folder}")
{what} = {before}.from_pretrained("{folder}")
```

## How it was made

```
{command}
```

Calibration: {calibration}. Options: `{options}`. `rankfold.json` holds, for every module, its rank, the reconstruction
error that was measured, and the paper's bounds.
"""


def reproduce_command(
    model: str, folder: str, method: dict, calibration: dict, mode: str, dtype: str, part: str | None = None
) -> str:
    """The command line that makes this checkpoint; ``part`` where there is more than one."""
    defaults, options = method_class(method["method"])().describe(), [f"--sparsity {method['sparsity']}"]
    for key, value in method.items():
        if value == defaults[key] or key in ("method", "sparsity"):
            continue
        text = option_text(value, ",")
        options.append(f"--{key} {text}" if key in SHARED_OPTIONS else f"--option {key}={text}")
    options += [*_calibrated(calibration), f"--mode {mode}", f"--dtype {dtype}", *([f"--part {part}"] if part else [])]
    return f"rankfold compress {shlex.quote(model)} -o {shlex.quote(folder)} --method {method['method']} " + " ".join(
        options
    )


def option_text(value, comma: str) -> str:
    """The value of an option as the command line takes it; ``comma``: what stands between the items of a list."""
    if isinstance(value, dict):
        return comma.join(f"{k}={v}" for k, v in value.items())
    return comma.join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def compare_command(identity: dict, run: dict, folder: str) -> str:
    """The command line that fills a folder with these rows.

    Args:
        identity: of the comparison (:func:`~.identity.comparison_identity`).
        run: ``{"methods": labels, "sparsities": numbers}``.
    """
    measures = identity["measures"]
    options = [f"--methods {shlex.quote(','.join(run['methods']))}"]
    options += [f"--sparsities {','.join(map(str, run['sparsities']))}", *_calibrated(identity["calibration"])]
    options += [f"--text {shlex.quote(text['text'])}" for text in measures["texts"]]
    options += [f"--text-length {measures['texts'][0]['length']}"]
    options += [f"--limit {measures['texts'][0]['limit']}"] if measures["texts"][0]["limit"] else []
    if "tasks" in measures:
        folder_of_rows = measures["tasks"]["folder"]
        options += [f"--tasks {','.join(measures['tasks']['tasks'])}"]
        options += [f"--tasks-from {shlex.quote(folder_of_rows)}"] if folder_of_rows else []
    options += ["--speed"] if "speed" in measures else []
    return f"rankfold compare {shlex.quote(identity['base_model'])} -o {shlex.quote(folder)} " + " ".join(
        [*options, f"--dtype {identity['dtype']}"]
    )


def _calibrated(calibration: dict) -> list[str]:
    """Which windows were drawn."""
    return [
        *(f"--calibration {shlex.quote(text)}" for text in _texts(calibration)),
        f"--samples {calibration.get('samples_wanted', calibration['samples'])}",
        *([] if calibration.get("kind") else [f"--length {calibration['length']}"]),
        f"--seed {calibration['seed']}",
    ]


def _texts(calibration: dict) -> list[str]:
    """Calibration texts as the command line takes them."""
    texts = calibration.get("texts", [calibration])
    if len({text.get("share") for text in texts}) == 1:
        return [text["source"] for text in texts]
    return [f"{text['source']}={text['share']}" for text in texts]


EXAMPLES = "image-text examples"  # a kind of calibration
_NEEDS = "import rankfold  # or, where it is not installed: trust_remote_code=True\n"


def model_card(
    plan,
    version: str,
    folder: str,
    calibration: dict,
    command: str,
    held_out: dict | None,
    *,
    stock: bool = False,
    auto: str = "AutoModelForCausalLM",
) -> str:
    """README.md of a compressed checkpoint; deterministic, so that a resumed run writes the same bytes.

    Args:
        stock: transformers loads it without rankfold.
        auto: the Auto class that it is loaded with.
    """
    before = {"images": "AutoImageProcessor", EXAMPLES: "AutoProcessor"}.get(calibration.get("kind"), "AutoTokenizer")
    method = plan.method
    options = {k: v for k, v in method.items() if v is not None and k != "method"}
    return _CARD.format(
        base=plan.model,
        needs="" if stock else _NEEDS,
        auto=auto,
        before=before,
        what="tokenizer" if before == "AutoTokenizer" else "processor",
        title=folder,
        folder=folder,
        version=version,
        method=method["method"],
        of="linear weights of the blocks" if method["of"] == "blocks" else "whole model",
        counted=plan.counted_weights,
        counted_after=plan.counted_weights - plan.removed_weights,
        sparsity=plan.sparsity,
        gone="set to zero, which stay in the file" if "zeros" in plan.facts else "removed",
        parameters=plan.parameters,
        parameters_after=plan.parameters_after,
        bytes=plan.bytes,
        bytes_after=plan.bytes_after,
        kv=plan.kv_bytes_per_token,
        kv_after=plan.kv_bytes_per_token_after,
        calibration=f"{_measured_on(calibration)} of `{calibration['source']}` (seed {calibration['seed']}, sha256 "
        f"{calibration['sha256']})",
        command=command,
        options=json.dumps(options),
        warning=f"\n> **{held_out['warning']}.**\n" if held_out and held_out["warning"] else "",
        outcome=_outcome(held_out, calibration),
    )


def _measured_on(calibration: dict) -> str:
    """How much of what."""
    kind = calibration.get("kind")
    if kind == EXAMPLES:
        return f"{calibration['samples']} {kind} of {calibration['tokens']} tokens"
    return f"{calibration['samples']} x {calibration['length']} {'patches' if kind == 'images' else 'tokens'}"


def _outcome(held_out: dict | None, calibration: dict) -> str:
    """A row of the table."""
    if held_out is None:
        return "| perplexity | not measured | not measured | no calibration window was held out |\n"
    if "state_error" in held_out:
        error, cosine = held_out["state_error"], held_out["cosine"]
        samples = f"{held_out['windows']} calibration samples that were not fitted"
        return f"| cosine to the dense model's last states | 1 | {cosine:.4f} | relative error {error:.3f} on {samples} |\n"
    dense, small, ratio = (held_out[key] for key in ("perplexity_dense", "perplexity", "ratio"))
    what = EXAMPLES if calibration.get("kind") == EXAMPLES else f"calibration windows of {held_out['length']} tokens"
    windows = f"{held_out['windows']} {what} that were not fitted"
    return f"| perplexity | {dense:.2f} | {small:.2f} | x {ratio:.2f} on {windows} |\n"
