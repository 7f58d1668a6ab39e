"""Measure where the time of a run goes: seconds by name, which add up to the total."""

import contextlib
import time
from collections.abc import Generator
from contextvars import ContextVar

PROBES = "probe_texts"
PARTS = ("reading", "forward", "moments", "decomposition", "writing", PROBES)
OTHER = "other"  # what none of these names covers

_current: ContextVar["Stopwatch"] = ContextVar("stopwatch")  # threads beside the run have none


class Stopwatch:
    """Count every second of a run to one part: the innermost that runs then; inside probe texts, to these.

    Nothing here waits for a device: on an accelerator, work is counted where the run waits for its result.
    """

    def __init__(self):
        self._since = time.perf_counter()
        self._parts: dict[str, float] = dict.fromkeys((*PARTS, OTHER), 0.0)
        self._running = [OTHER]  # from the outermost to the innermost

    @contextlib.contextmanager
    def part(self, name: str) -> Generator[None]:
        """Count what runs inside to ``name``, but for the parts inside it."""
        self._charge()
        self._running.append(
            PROBES if self._running[-1] == PROBES else name
        )  # what they take is of interest as a whole
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far: ``total``, and the parts it is made of."""
        self._charge()
        return {"total": sum(self._parts.values()), **self._parts}

    def add(self, seconds: dict[str, float]) -> None:
        """Count what :meth:`seconds` returned in an earlier process, too."""
        for name in self._parts:
            self._parts[name] += seconds[name]

    def _charge(self) -> None:
        now = time.perf_counter()
        self._parts[self._running[-1]] += now - self._since
        self._since = now


@contextlib.contextmanager
def timed_run() -> Generator[Stopwatch]:
    """Time what runs inside; a context or a decorator."""
    stopwatch = Stopwatch()
    token = _current.set(stopwatch)
    try:
        yield stopwatch
    finally:
        _current.reset(token)


def go_on_from(seconds: dict[str, float]) -> None:
    """:meth:`Stopwatch.add` to the run under way."""
    _current.get().add(seconds)


def seconds_so_far() -> dict[str, float]:
    """Return :meth:`Stopwatch.seconds` of the run under way."""
    return _current.get().seconds()


@contextlib.contextmanager
def time_spent(name: str) -> Generator[None]:
    """Count what runs inside to one of :data:`PARTS`, where a run is timed; a context or a decorator."""
    stopwatch = _current.get(None)
    with stopwatch.part(name) if stopwatch else contextlib.nullcontext():
        yield
