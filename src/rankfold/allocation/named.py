"""Options that belong together, as one object or as text: ``OWL(spread=0.1)`` is ``owl:spread=0.1``."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, TypeVar

from ..errors import OptionError, check_choice


@dataclass(frozen=True)
class Named:
    """Options with a name, in a table with others of its kind."""

    kind: ClassVar[str]  # of option, for messages
    name: ClassVar[str]

    def __str__(self) -> str:
        """Return the text that makes it again, every option written out."""
        given = [(f.name, getattr(self, f.name), int if isinstance(f.default, int) else float) for f in fields(self)]
        listed = ",".join(f"{key}={kind(value)}" for key, value, kind in given if value is not None)
        return f"{self.name}:{listed}" if listed else self.name

    @classmethod
    def of_text(cls, options: str) -> Self:
        """Make it from ``key=value,key=value``."""
        defaults: dict[str, Any] = {f.name: f.default for f in fields(cls)}
        given: dict[str, int | float] = {}
        for item in filter(None, options.split(",")):
            key, _, value = item.partition("=")
            check_choice(f"option of {cls.kind} {cls.name}", key, defaults)
            if key in given:
                raise OptionError(f"{cls.kind} {cls.name} gives {key!r} more than once; give it once")
            given[key] = _number(f"{key} of {cls.kind} {cls.name}", value, defaults[key])
        return cls(**given)

    def check(self, key: str, allowed: str, is_allowed: Callable[[float], bool]) -> None:
        """Raise :class:`OptionError` unless an option is a finite number that ``is_allowed``; whole if its default is.

        Args:
            allowed: what it may be, for the message; after a semicolon, why.
        """
        value, is_whole = getattr(self, key), isinstance(getattr(type(self), key), int)
        what = f"{key} of {self.kind} {self.name}"
        if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
            raise OptionError(f"{what} must be a {'whole ' if is_whole else ''}number, got {value!r}")
        if not math.isfinite(value):
            raise OptionError(f"{what} must be a finite number, got {value}")
        if not is_allowed(value):
            rule, _, why = allowed.partition("; ")
            raise OptionError(f"{what} must be {rule}, got {value}" + (f"; {why}" if why else ""))


def _number(what: str, value: str, default: float | None) -> int | float:
    try:
        return int(value) if isinstance(default, int) else float(value)
    except ValueError:
        kind = "whole number" if isinstance(default, int) else "number"
        raise OptionError(f"{what} must be a {kind}, got {value!r}") from None


T = TypeVar("T", bound=Named)


def from_text(kind: type[T], value: T | str, table: Mapping[str, type[T]]) -> T:
    """Return an option object, given itself or as text.

    Args:
        kind: base class of the objects.
        table: name -> class.

    Raises:
        OptionError: neither, an unknown name or option, or a value out of range; the message says what is allowed.
    """
    if isinstance(value, kind):
        return value
    if not isinstance(value, str):
        raise OptionError(
            f"{kind.kind} must be one of {', '.join(table)}, or an object such as "
            f"{next(iter(table.values())).__name__}(), got {' '.join(repr(value).split())[:80]}"
        )
    name, _, options = value.partition(":")
    check_choice(kind.kind, name, table)
    return table[name].of_text(options)
