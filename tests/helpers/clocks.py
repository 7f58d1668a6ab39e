"""Clocks that are set by hand."""

from collections.abc import Callable


def set_by_hand(monkeypatch, module, function: str) -> Callable[[float], None]:
    """Stop a clock of a module that imports ``time``; what is returned moves it on by so many seconds."""
    now = [1000.0]
    monkeypatch.setattr(module.time, function, lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait
