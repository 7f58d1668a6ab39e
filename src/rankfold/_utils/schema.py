"""What a JSON record must hold, checked once where it is read."""

import math
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

NUMBER = int | float
Kind = Any  # what check_record takes


class Each:
    """An object with any keys, some of which it must have, and values of one kind."""

    def __init__(self, kind: Kind, *needed: str):
        self.kind = kind
        self.needed = needed


class Maybe:
    """null, or a value of a kind; so is the key, which may be missing."""

    def __init__(self, kind: Kind):
        self.kind = kind


class OneOf:
    """One of these strings."""

    def __init__(self, *values: str):
        self.values = values


def check_record(value: Any, kind: Kind, path: Path, where: str = "it") -> None:
    """Raise :class:`CheckpointError` unless a record is as it was written.

    Args:
        value: what was read from ``path``.
        kind: a type; ``[kind]`` for a list; ``{key: kind}`` for an object with these keys; or a class above.
        where: the keys that lead to ``value``.
    """
    if isinstance(kind, Maybe):
        return None if value is None else check_record(value, kind.kind, path, where)
    if isinstance(kind, OneOf):
        if value not in kind.values:
            raise CheckpointError(_should_be(path, where, f"one of {', '.join(kind.values)}", value))
        return None
    wanted: Any = list if isinstance(kind, list) else dict if isinstance(kind, dict | Each) else kind
    endless = isinstance(value, float) and not math.isfinite(value)  # JSON has such numbers, 1e400 among them
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool) or endless:
        raise CheckpointError(_should_be(path, where, _name(wanted), value))
    for key, item, below in _below(value, kind, path, where):
        check_record(item, below, path, str(key) if where == "it" else f"{where}.{key}")


def _below(value: Any, kind: Kind, path: Path, where: str) -> list[tuple[Any, Any, Kind]]:
    """Return the keys to go on with, what is there, and what should be."""
    if isinstance(kind, list):
        return [(index, item, kind[0]) for index, item in enumerate(value)]
    if not isinstance(kind, dict | Each):
        return []
    needed = kind.needed if isinstance(kind, Each) else [key for key in kind if not isinstance(kind[key], Maybe)]
    missing = [key for key in needed if key not in value]
    if missing:
        raise CheckpointError(f"{path} is damaged: {where} lacks {', '.join(missing)}; copy or make it again")
    if isinstance(kind, Each):
        return [(key, item, kind.kind) for key, item in value.items()]
    return [(key, value[key], below) for key, below in kind.items() if key in value]


def _should_be(path: Path, where: str, wanted: str, value: Any) -> str:
    return f"{path} is damaged: {where} should be {wanted}, got {str(value)[:40]!r}; copy or make it again"


def _name(kind: Kind) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        int: "a whole number",
        NUMBER: "a number",
        bool: "a bool",
    }
    return names[kind]
