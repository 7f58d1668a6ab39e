"""What a JSON record must hold, checked once where it is read."""

import math
from pathlib import Path

from ..errors import CheckpointError

__all__ = ["NUMBER", "Each", "Maybe", "check_record"]

NUMBER = int | float


class Each:
    """An object with any keys and values of one kind."""

    def __init__(self, kind):
        self.kind = kind


class Maybe:
    """null, or a value of a kind; so is the key, which may be missing."""

    def __init__(self, kind):
        self.kind = kind


def check_record(value, kind, path: Path, where: str = "it") -> None:
    """Raise :class:`CheckpointError` unless a record is as it was written.

    Args:
        value: what was read from ``path``.
        kind: a type; ``[kind]`` for a list; ``{key: kind}`` for an object with these keys; or a class above.
        where: the keys that lead to ``value``.
    """
    if isinstance(kind, Maybe):
        return None if value is None else check_record(value, kind.kind, path, where)
    wanted = list if isinstance(kind, list) else dict if isinstance(kind, dict | Each) else kind
    endless = isinstance(value, float) and not math.isfinite(value)  # JSON has such numbers, 1e400 among them
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool) or endless:
        raise CheckpointError(
            f"{path} is damaged: {where} should be {_name(wanted)}, got {str(value)[:40]!r}; copy or make it again"
        )
    for key, below in _below(value, kind, path, where):
        check_record(value[key], below, path, str(key) if where == "it" else f"{where}.{key}")


def _below(value, kind, path: Path, where: str):
    """Keys to go on with and what is to be found there."""
    if isinstance(kind, list):
        return [(index, kind[0]) for index in range(len(value))]
    if isinstance(kind, Each):
        return [(key, kind.kind) for key in value]
    if not isinstance(kind, dict):
        return []
    missing = [key for key, below in kind.items() if key not in value and not isinstance(below, Maybe)]
    if missing:
        raise CheckpointError(f"{path} is damaged: {where} lacks {', '.join(missing)}; copy or make it again")
    return [(key, below) for key, below in kind.items() if key in value]


def _name(kind) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        int: "a whole number",
        NUMBER: "a number",
        bool: "a bool",
    }
    return names[kind]
