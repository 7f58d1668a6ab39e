"""Progress bars with an estimate of the time left, on stderr; quiet where stderr is not a terminal."""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["track"]

T = TypeVar("T")
_shown: Progress | None = None  # a terminal has room for one display: what begins inside another gets a line in it


def track(items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """Iterate over ``items`` under a bar named ``label``; ``total`` where ``items`` has no length."""
    total = len(items) if total is None and isinstance(items, Sized) else total
    with _display() as bar:
        task = bar.add_task(label, total=total)
        try:
            for item in items:
                yield item
                bar.advance(task)
        finally:
            if bar is _shown:  # the line of a display that goes on
                bar.remove_task(task)


@contextlib.contextmanager
def _display() -> Iterator[Progress]:
    """The display that is there, or a new one."""
    global _shown
    if _shown is not None:
        yield _shown
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), disable=not sys.stderr.isatty()) as bar:
        _shown = bar
        try:
            yield bar
        finally:
            _shown = None
