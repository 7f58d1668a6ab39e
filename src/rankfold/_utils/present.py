"""Values that may be missing elsewhere, and are there here."""

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """Return ``value``, which is not None where this is called."""
    assert value is not None
    return value
