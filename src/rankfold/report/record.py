"""The run record: one JSON with everything a number depends on."""

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import torch

from ..version import __version__

__all__ = ["environment", "peak_memory_bytes", "process_status", "run_record", "versions"]


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    packages = ("torch", "transformers", "safetensors")
    return {"rankfold": __version__, "python": platform.python_version()} | {p: metadata.version(p) for p in packages}


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


def environment(device: torch.device) -> dict:
    """Hardware, without names of the machine."""
    return {
        "device": device.type,
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "system": platform.system(),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            return next(line.split(":", 1)[1].strip() for line in handle if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def run_record(source, description: dict, command: str, plan, reports: dict, seconds: dict) -> dict:
    """``rankfold.json``: everything but ``run`` is equal between two runs of the same configuration."""
    estimates = {"seconds": plan.seconds, "peak_memory_bytes": plan.peak_memory_bytes}
    measurements = {"seconds": seconds, "peak_memory_bytes": peak_memory_bytes(), "estimated": estimates}
    return {
        **description,
        "command": command,
        "versions": versions(),
        "plan": {key: value for key, value in plan.to_dict().items() if key not in estimates},
        "blocks": reports,
        "run": measurements | environment(source.device),
    }
