"""The run record: one JSON with everything a number depends on."""

import functools
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .._utils.files import read_json
from .._utils.hardware import cpu_facts
from .._utils.processes import process_count
from .._utils.schema import NUMBER, Each, Maybe, OneOf, check_record
from ..data.calibration_data import upgrade_calibration
from ..errors import CheckpointError
from ..methods.upgrade import upgraded as upgraded_options
from ..version import __version__
from .goal import GOAL

NAME = "rankfold.json"
# What a record says of every kind of probe text, or why there is none; older ones say nothing.
KIND = {
    "passages": int,
    "perplexity_dense": NUMBER,
    "perplexity": NUMBER,
    "ratio": NUMBER,
    "standard_error": Maybe(NUMBER),
    "is_known": bool,
    "is_damaged": bool,
}
PROBE_TEXTS = Maybe({"skipped": Maybe(str), "kinds": Maybe(Each(KIND)), "warning": Maybe(str)})
# What a record says of training after the compression.
RECOVERY: dict[str, Any] = {
    "recovered": bool,
    "unchanged_because": Maybe(str),
    "tune": str,
    "loss": OneOf("kl", "next-token", "both", "states"),
    "lr": Maybe(NUMBER),
    "length": int,
    "seed": int,
    "teacher_name": str,
    "minutes": Maybe(NUMBER),  # asked for; as many tokens then as time allows
    "texts": Each({"num_samples": int}),
    "tokens_seen": int,
    "tuned_parameters": int,
    "probe_texts_before": PROBE_TEXTS,  # before training; those of the record are after it
    "held_out": Each(
        {
            "perplexity_dense": NUMBER,
            "perplexity_before": NUMBER,
            "perplexity": NUMBER,
            "ratio": NUMBER,
            "standard_error": Maybe(NUMBER),
            "sequences": int,
        }
    ),
}
RECOVERY["earlier"] = Maybe(RECOVERY)
# What it says of a plan, which is read back as one.
MODULE = {
    "block": int,
    "module": str,
    "rank": int,
    "of": int,
    "weights": int,
    "dense_weights": int,
    "relative_error": Maybe(NUMBER),
}
PLAN = {
    "model": str,
    "method": {"method": str, "scope": str, "sparsity": NUMBER},
    "modules": [MODULE],
    "counted_weights": int,
    "removed_weights": int,
    "sparsity": NUMBER,
    "parameters": int,
    "parameters_after": int,
    "bytes": int,
    "bytes_after": int,
    "kv_bytes_per_token": int,
    "kv_bytes_per_token_after": int,
    "part": Maybe(str),
    "facts": {},
    "budget": Maybe({"excess": Maybe(str)}),
}
# What it must hold for what is made of it: tables, the model card, a result, the same run again.
RECORD = {
    "rankfold_version": str,
    "method": str,
    "mode": str,
    "base_model": str,
    "calibration": {
        "source": str,
        "num_samples": int,
        "max_length": int,
        "tokens": int,
        "seed": int,
        "sha256": str,
    },
    "counts": {
        "sparsity": NUMBER,
        "counted_weights": int,
        "removed_weights": int,
        "parameters": int,
        "bytes": int,
        "kv_bytes_per_token": int,
    },
    "plan": PLAN,
    "blocks": Each(Each({"rank": int, "of": int, "relative_error": NUMBER, "held_out_error": Maybe(NUMBER)})),
    "held_out": Maybe(
        {
            "windows": int,
            "perplexity_dense": NUMBER,
            "perplexity": NUMBER,
            "ratio": NUMBER,
            "standard_error": Maybe(NUMBER),
            "dense_warning": Maybe(str),
            "warning": Maybe(str),
        }
    ),
    "probe_texts": PROBE_TEXTS,
    "recovery": Maybe(RECOVERY),
    "goal": Maybe(GOAL),
    "run": {"seconds": Each(NUMBER, "total"), "estimated": {"peak_memory_bytes": int}},
}
# Of an encoder, which has no perplexity.
STATES = {"windows": int, "state_error": NUMBER, "cosine": NUMBER, "warning": Maybe(str)}


def read_record(place: Path) -> dict:
    """Return the record of a compressed checkpoint.

    Args:
        place: the checkpoint, or its ``rankfold.json``.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = place if place.is_file() else place / NAME
    if not path.exists():
        found = f"{place} has no {NAME}" if place.exists() else f"there is no folder {place}"
        raise CheckpointError(f"{found}: not a checkpoint written by `rankfold compress`")
    try:
        record = upgrade_calibration(read_json(path))
        _upgrade_options(record)
        _check(record, path)
    except RecursionError as error:
        raise CheckpointError(f"{path} is damaged: it is nested too deeply; copy or make it again") from error
    return record


def records_of(record: dict) -> list[dict]:
    """Return the records of the components compressed in one run, in their order; of any other run the record."""
    found = [record]
    while "before" in found[0]:
        found.insert(0, found[0]["before"])
    return found


def _upgrade_options(record: Any) -> None:
    """Give the options of a record, and of those before it, the names of today."""
    while isinstance(record, dict):
        for holder, key in ((record, "options"), (record.get("plan"), "method")):
            if isinstance(holder, dict) and isinstance(holder.get(key), dict):
                holder[key] = upgraded_options(holder[key])
        record = record.get("before")


def _check(record: Any, path: Path) -> None:
    held_out = record.get("held_out") if isinstance(record, dict) else None
    of_states = isinstance(held_out, dict) and "state_error" in held_out
    check_record(record, RECORD | ({"held_out": Maybe(STATES)} if of_states else {}), path)
    if "before" in record:
        _check(record["before"], path)
        for component in (record, record["before"]):  # of several, each has its name
            check_record(component, {"plan": {"part": str}}, path)


def versions(*others: str) -> dict[str, str]:
    """Return the versions of what the numbers depend on, and of other packages."""
    return {"rankfold": __version__, "python": platform.python_version(), **_packages(*others)}


@functools.cache
def _packages(*others: str) -> dict[str, str]:
    """Read the metadata of packages, once: it is a mail that is parsed."""
    return {name: metadata.version(name) for name in ("torch", "transformers", "safetensors", *others)}


def process_status(name: str) -> int | None:
    """A line of /proc/self/status in bytes; ``None`` where there is none."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def peak_memory_bytes() -> int | None:
    """Largest resident set of this process so far; ``None`` where the system does not tell (Windows)."""
    peak = process_status("VmHWM")
    if peak is not None:  # not ru_maxrss, which a child inherits from the process that started it
        return peak
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_memory_bytes(device: torch.device) -> int | None:
    """Return the most bytes of tensors on an accelerator so far; ``None`` for a CPU, and where PyTorch has no count."""
    count = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return None if device.type == "cpu" or count is None else count(device)


def environment(device: torch.device) -> dict:
    """Hardware, without names of the machine."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return {
        "device": device.type,
        "accelerator": None if device.type == "cpu" else name(device) if name else device.type,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "system": platform.system(),
    }


def _cpu_name() -> str:
    return cpu_facts().get("model name") or platform.processor() or platform.machine()


def run_record(source, description: dict, plan, reports: dict) -> dict:
    """``rankfold.json``: everything but ``run`` is equal between two runs of the same configuration. Seconds are added
    when the file is written.

    Args:
        description: what was done, counts and what was found on held-out samples; ``before``, the record of the part
            that was compressed before this one, where one was.
    """
    measurements = {
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_device_memory_bytes": peak_device_memory_bytes(source.device),
        "estimated": {"peak_memory_bytes": plan.peak_memory_bytes},
        "processes": process_count(),
        "offload": source.offload.name if source.offload else None,
    }
    elsewhere = {"seconds", "peak_memory_bytes", "calibration"}
    planned = {key: value for key, value in plan.to_dict().items() if key not in elsewhere}
    record = {
        **description,
        "versions": versions(),
        "plan": planned,
        "blocks": reports,
        "run": measurements | environment(source.device),
    }
    return json.loads(json.dumps(record))  # as it will be read
