"""Show how far a run is, on stderr: bars on a terminal, elsewhere a line now and then.

A line tells what is done, an estimate of what is left, and what is known of the result so far. It is written when a
step is done and the last line is a minute old, so a log of an hour has at most sixty.
"""

import contextlib
import functools
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Sequence, Sized
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text
from tqdm import tqdm

from .processes import is_first
from .sizes import duration

LINE_SECONDS = 60.0  # between two lines of a log, at least

T = TypeVar("T")


class _Moment(NamedTuple):
    clock: float
    busy: float  # processor time, of all threads


def _now() -> _Moment:
    return _Moment(time.monotonic(), time.process_time())


def _clock_per_busy(steps: list[_Moment]) -> float:
    """Return the median of clock over processor time, every step weighted by its processor time."""
    ratios = sorted((step.clock / step.busy, step.busy) for step in steps if step.busy)
    sums = [*accumulate(busy for _, busy in ratios)]
    return ratios[bisect_left(sums, sums[-1] / 2)][0] if ratios else 0.0


class Steps:
    """Know how many steps of some work are done, and guess when the rest will be.

    Args:
        label: the work.
        total: its steps; ``None`` where nobody knows.
        costs: what each step takes, in any unit; all alike by default.
        note: what is known of the result so far, as a phrase; empty where nothing is.
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        costs: Sequence[float] | None = None,
        note: Callable[[], str] = str,
    ):
        self.label, self.total, self.costs, self._note = label, total, costs, note
        self.note = ""
        self._ends = [_now()]  # when the first step began and when each one was done

    @property
    def done(self) -> int:
        return len(self._ends) - 1

    def advance(self) -> None:
        """Note that one more step is done."""
        self._ends.append(_now())
        self.note = self._note()

    @property
    def seconds(self) -> float:
        """Seconds since the work began."""
        return _now().clock - self._ends[0].clock

    @property
    def seconds_left(self) -> float | None:
        """Estimate by the later half of the steps done: those of an earlier run are passed over quickly.

        Steps are added up in processor time, which stands still while the process is stopped, and turned into time by
        the median of their ratios.
        """
        if self.total is None or not self.done:
            return None
        half, costs = self.done // 2, self.costs or [1.0] * self.total
        busy = self._ends[-1].busy - self._ends[half].busy
        rate = busy / (sum(costs[half : self.done]) or 1.0)
        steps = [_Moment(b.clock - a.clock, b.busy - a.busy) for a, b in pairwise(self._ends[half:])]
        return _clock_per_busy(steps) * max(0.0, rate * sum(costs[self.done :]) - (_now().busy - self._ends[-1].busy))

    def line(self) -> str:
        """Return what a log says of this work."""
        left = self.seconds_left
        parts = [
            f"{self.label}: {self.done} of {self.total}" if self.total is not None else f"{self.label}: {self.done}",
            f"{duration(self.seconds)} so far",
            f"about {duration(left)} left" if left is not None and self.done < (self.total or 0) else "",
            self.note,
        ]
        return ", ".join(filter(None, parts))


class _Log:
    """Lines in a file, at least :data:`LINE_SECONDS` apart, whichever work they are about."""

    def __init__(self):
        self.running: list[Steps] = []  # from the outermost to the innermost
        self.last = time.monotonic()

    def say(self) -> None:
        """Write a line, unless the last one is too young."""
        if time.monotonic() - self.last >= LINE_SECONDS:
            self.last = time.monotonic()
            sys.stderr.write("; ".join(steps.line() for steps in self.running) + "\n")
            sys.stderr.flush()


_log: _Log | None = None  # of the run under way


def track(items: Iterable[T], label: str, **about: Any) -> Generator[T]:
    """Iterate over ``items`` and show progress; ``about``: see :class:`Steps`."""
    with count_steps(label, len(items) if isinstance(items, Sized) else None, **about) as advance:
        for item in items:
            yield item
            advance()


@contextlib.contextmanager
def count_steps(label: str, total: int | None = None, **about: Any) -> Generator[Callable[[], None]]:
    """Show how far some work is; yield what is to be called when a step is done. Arguments as for :class:`Steps`."""
    steps = Steps(label, total, **about)
    if not is_first():
        yield steps.advance
        return
    with _shown(steps) if sys.stderr.isatty() else _logged(steps) as show:

        def advance() -> None:
            steps.advance()
            show()

        yield advance


@contextlib.contextmanager
def one_run() -> Generator[_Log]:
    """Make all that happens inside one run, with a minute between two lines of its log."""
    global _log
    if _log is not None:
        yield _log
        return
    _log = _Log()
    try:
        yield _log
    finally:
        _log = None


@contextlib.contextmanager
def _logged(steps: Steps) -> Generator[Callable[[], None]]:
    with one_run() as log:
        log.running.append(steps)
        try:
            yield log.say
        finally:
            log.running.remove(steps)


class _Left(ProgressColumn):
    """What is left, by our estimate: rich's goes by the last half minute, in which a large block does not end."""

    def render(self, task: Task) -> Text:
        left = task.fields["steps"].seconds_left
        return Text(f"{duration(left)} left" if left is not None else "", style="progress.remaining")


class _Note(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["steps"].note)


@functools.cache
def _terminal() -> Console:
    """Return the console that all bars share: one that begins inside another is shown below it."""
    return Console(stderr=True)


@contextlib.contextmanager
def _shown(steps: Steps) -> Generator[Callable[[], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        _Left(),
        _Note(),
    )
    with Progress(*columns, console=_terminal(), transient=True) as bars:
        task = bars.add_task(steps.label, total=steps.total, steps=steps)
        yield lambda: bars.advance(task)


@contextlib.contextmanager
def without_bars() -> Generator[None]:
    """Keep away the bars of other libraries: they would cover ours on a terminal, and fill a log.

    tqdm reads TQDM_DISABLE when it is imported, and who makes a bar may overrule it.
    """
    make = tqdm.__init__

    def make_disabled(self: "tqdm[Any]", *args: Any, **options: Any) -> None:
        make(self, *args, **(options | {"disable": True}))

    tqdm.__init__ = make_disabled
    try:
        yield
    finally:
        tqdm.__init__ = make
