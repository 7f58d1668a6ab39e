"""Every error rankfold raises on purpose.

Each message is one line that says what was got, what is allowed, and what to do. The command line prints that line and
exits with code 2; anything that is not a :class:`RankfoldError` is a bug and shows its traceback.
"""

import contextlib
from collections.abc import Generator, Iterable
from contextvars import ContextVar
from difflib import get_close_matches

__all__ = [
    "CheckpointError",
    "DataError",
    "NumericsError",
    "OptionError",
    "RankfoldError",
    "UnsupportedModelError",
    "called_by",
    "check_choice",
    "first_line",
    "method_option",
    "option",
    "suggestion",
    "written",
]


class RankfoldError(Exception):
    """Base of all errors below."""


class OptionError(RankfoldError, ValueError):
    """An option is outside its range, unknown, or does not go with another one."""


class UnsupportedModelError(RankfoldError):
    """The model's architecture, or a module of it, is not one that the method can take."""


class DataError(RankfoldError):
    """The text or the token ids cannot be used."""


class CheckpointError(RankfoldError):
    """A folder or file cannot be read, is damaged, or would be overwritten."""


class NumericsError(RankfoldError):
    """Weights, activations or moments are not finite, or a factorisation broke down."""


def first_line(error: BaseException) -> str:
    """Return another library's error in one line: its first, with the next where that only announces it; or its type.
    Of a missing key Python says the key alone. A sentence that goes on in the next line is left out, where another one
    is before it."""
    said = f"no entry {error}" if isinstance(error, KeyError) and " " not in str(error) else str(error).strip()
    first, _, rest = (said or type(error).__name__).partition("\n")
    if first.rstrip().endswith(":") and rest.strip():
        first = f"{first.strip()} {rest.strip().partition(chr(10))[0]}"
    elif rest.strip()[:1].islower() and ". " in first:
        first = first.rpartition(". ")[0]
    return first.strip()[:300]


def suggestion(value: str, allowed: Iterable[str]) -> str:
    """Return ``"did you mean 'x'? "`` where something allowed is close to ``value``, otherwise nothing."""
    close = get_close_matches(value, list(allowed), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def check_choice(what: str, value: str, allowed: Iterable[str]) -> None:
    """Raise :class:`OptionError` with a suggestion unless ``value`` is allowed."""
    allowed = list(allowed)
    if value not in allowed:
        hint = suggestion(str(value), map(str, allowed))
        raise OptionError(f"unknown {what} {value!r}; {hint}available: {', '.join(allowed)}")


_caller: ContextVar[str] = ContextVar("caller", default="python")


@contextlib.contextmanager
def called_by(caller: str) -> Generator[None]:
    """Name options as this caller gives them: ``python``, ``command``, or ``compare``, whose methods have their own."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)


def option(name: str, value: object = None) -> str:
    """Return an option as the caller gives it: ``keep=True`` in Python, ``--keep`` in a command."""
    caller = _caller.get()
    if caller == "python":
        return name if value is None else f"{name}={value!r}"
    if caller == "compare" and name == "method":  # it has many, in an option of another name
        return f"method {value}"
    flag = f"--{name.replace('_', '-')}"
    return flag if value in (None, True) else f"{flag} {written(value)}"


# Options of a method that the command line has flags for; others are given by --set.
METHOD_FLAGS = frozenset(
    {"sparsity", "modules", "target", "allocation", "scope", "budget", "rank_multiple", "exclude_blocks"}
)


def method_option(name: str, value: object = None) -> str:
    """Return an option of a method as the caller gives it: ``ridge=1.0``, ``--set ridge=1.0`` (``--target stock``
    where it has a flag) or ``METHOD:ridge=1.0``."""
    caller = _caller.get()
    if caller == "compare":
        return f"METHOD:{name}={'...' if value is None else written(value, '+')}"
    if caller == "python" or name in METHOD_FLAGS:
        return option(name, value)
    return f"{option('set')} {name}={'...' if value is None else written(value)}"


def command(name: str) -> str:
    """Return what is to be called: ``rankfold.calibrate``, or the command where one was given."""
    return f"rankfold.{name}" if _caller.get() == "python" else f"`rankfold {name}`"


def written(value: object, comma: str = ",") -> str:
    """Return the value of an option as the command line takes it; ``comma`` stands between the items of a list."""
    if isinstance(value, dict):
        return comma.join(f"{key}={item}" for key, item in value.items())
    return comma.join(map(str, value)) if isinstance(value, list | tuple) else str(value).replace(",", comma)
