"""What all jobs share: the device and its state, the clock, and rows that are written at once."""

import contextlib
import functools
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

import common
from rankfold._utils.hardware import seconds_of
from rankfold.report.record import peak_memory_bytes

LEAST_SECONDS = 0.2  # that runs of a short operation take together
LONG_SECONDS = 2.0  # of a call that is not repeated
QUERY = "driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"


@dataclass
class Bench:
    """One call of the script."""

    device: torch.device
    is_tiny: bool
    record: common.Record
    folder: Path  # for models, removed in the end
    limit: float  # seconds after which nothing new is begun
    shape: str | None = None
    methods: list[str] | None = None
    job: str = ""
    left: list[str] = field(default_factory=list)

    @property
    def seconds_left(self) -> float:
        return self.limit - (time.perf_counter() - common.STARTED)

    def wants(self, name: str, least: float = 0.0) -> bool:
        """Tell whether a row is not there yet and ``least`` seconds are left for it."""
        if self.record.done(f"{self.job} {name}"):
            return False
        if self.seconds_left < least or self.seconds_left <= 0:
            self.left.append(f"{self.job} {name}")
            return False
        return True

    def add(self, name: str, **facts) -> None:
        """Write a row with the card and the state it is in."""
        self.record.drop(f"{self.job} {name}")
        self.record.add(f"{self.job} {name}", job=self.job, **facts, **card_of(self.device))
        common.say(f"{self.job} {name}: " + ", ".join(f"{key} {_short(value)}" for key, value in facts.items()))

    @contextlib.contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """Write an error as a row, and go on; out of memory is one of them."""
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.add(name, error=f"{type(error).__name__}: {lines[0][:200]}")
        empty_cache(self.device)

    def seconds(self, run: Callable[[], object], repeats: int = 3) -> float:
        """Return the median seconds of a call, with all work of the device; the first counts only if it is long."""
        first = seconds_of(run, self.device)
        if first > LONG_SECONDS:
            return first
        found: list[float] = []
        while len(found) < repeats or (sum(found) < LEAST_SECONDS and not self.is_tiny and len(found) < 200):
            found.append(seconds_of(run, self.device))
        return statistics.median(found)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)[:80]


@functools.cache
def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return common.environment(device)["cpu"]
    return torch.get_device_module(device).get_device_name(device)


def card_of(device: torch.device) -> dict:
    """Return card, driver, versions and the clocks at this moment."""
    found = {"card": _name(device), "torch": torch.__version__, "cuda": torch.version.cuda}
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        if device.type == "cuda":
            index = device.index or torch.cuda.current_device()
            asked = ["nvidia-smi", f"--id={index}", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
            values = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.split(",")
            found |= dict(zip(QUERY.split(","), map(str.strip, values), strict=True))
    return found


def memory_of(device: torch.device) -> int:
    """Return the bytes of a device's memory; of a CPU the 16 GB that a plan of tiny models takes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return 16 * 10**9


def empty_cache(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def start_peak(device: torch.device) -> int:
    """Begin a measurement of peak memory; returns what is taken already."""
    if device.type == "cpu":
        return peak_memory_bytes() or 0
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    return torch.accelerator.memory_allocated(device)


def peak_since(device: torch.device, before: int) -> int:
    """Return the bytes at the peak beyond what was taken before; of a CPU of the whole process."""
    peak = peak_memory_bytes() or 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)
    return max(0, peak - before)
