"""What a command line must not be, whatever the command; and one line for what the machine refuses."""

import math
import os
import re
from collections import Counter
from dataclasses import fields

import typer
from typer.core import TyperCommand

from ..errors import OptionError
from .options import MethodOptions
from .quiet import quiet_libraries

__all__ = ["Command", "UsageError", "explain", "usage"]

UsageError = typer.TyperException  # what the parser raises
PLACES = ("model", "text", "calibration", "tasks_from", "against")  # arguments that may begin with ~
ALONE = ("sparsity", "part", "moments")  # of one part
MEASURED = ("calibration", "samples", "length", "seed", "field", "mode")  # settled when moments were measured

# Option -> those of which one must be given, or nothing reads it; where a command has them.
BESIDE = {
    "tasks_from": ("tasks",),
    "num_fewshot": ("tasks",),
    "batch_size": ("tasks",),
    "against": ("speed",),
    "batch_sizes": ("speed",),
    "length": ("text",),
    "limit": ("text", "tasks"),
    "field": ("text",),
    "seed": ("temperature",),
}
HAS_COLUMNS = re.compile(
    r"\.(jsonl|ndjson|json|csv|tsv|parquet)(=[^=/]*)?$|^(\w+=)?hub:", re.IGNORECASE
)  # among names of texts and images


class Command(TyperCommand):
    """A command whose arguments are checked before it runs."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, list(args))
        given = self.make_parser(ctx).parse_args(args=list(args))[2]
        for parameter, times in Counter(given).items():
            if times > 1 and not getattr(parameter, "multiple", False):
                raise OptionError(f"{_label(parameter)} is given {times} times; give it once")
        for parameter in self.params:
            _check_value(_label(parameter), parameter.name, ctx.params.get(parameter.name))
        names = {parameter.name for parameter in given}
        if ctx.params.get("parts") is not None:
            _check_beside_parts(names)
        if ctx.params.get("moments") is not None:
            _check_beside_moments(names, ctx.params)
        for name in names:
            _check_beside(name, names, ctx.params)
        if "field" in names:
            _check_field(ctx.params)
        if "method" in ctx.params:
            _check_method(names, ctx.params)
        return rest

    def invoke(self, ctx):
        with quiet_libraries():
            return super().invoke(ctx)


def _label(parameter) -> str:
    names = [name for name in parameter.opts if name.startswith("--")]
    return names[0] if names else parameter.name.upper()


def _check_value(label: str, name: str, value) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise OptionError(f"{label} must be a finite number, got {value}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise OptionError(f"{label} must fit into 64 bits, got {str(value)[:24]}...; choose a smaller number")
    if name in PLACES and isinstance(value, list | tuple):
        for one in value:
            _check_value(label, name, one)
    if name in PLACES and isinstance(value, str):
        place = value.rpartition(":")[2]  # ALIAS:FILE
        place = place.removeprefix("language=").removeprefix("vision=")  # PART=FILE
        if place.startswith("~") and os.path.expanduser(place) == place:
            raise OptionError(f"{label}: there is no user whose home is {place.split('/')[0]!r}; write the path out")


def _check_beside(name: str, given: set[str], values: dict) -> None:
    """Refuse what nothing would read."""
    needed = [other for other in BESIDE.get(name, ()) if other in values]
    if needed and not given & set(needed):
        flags = " or ".join(f"--{other}" for other in needed)
        raise OptionError(f"--{name.replace('_', '-')} would be ignored without {flags}; give both or neither")


def _check_field(values: dict) -> None:
    """Refuse a column where nothing has columns to choose from."""
    names = [*(values.get("calibration") or ()), *(values.get("text") or ())]
    if names and not any(HAS_COLUMNS.search(name) for name in names):
        raise OptionError(
            f"--field {values['field']} would be ignored, of {' and '.join(names)}; it is of files with rows, such as .jsonl"
        )


def _check_method(given: set[str], values: dict) -> None:
    """Refuse options of a method that the others leave no use for."""
    from ..methods.config import ignored_options

    method = MethodOptions(**{field.name: values[field.name] for field in fields(MethodOptions)}).parse()
    for name, goes_with in ignored_options(method.describe()).items():
        if name in given:
            raise OptionError(f"--{name} would be ignored, it goes with {goes_with}; leave it out")


def _check_beside_moments(given: set[str], values: dict) -> None:
    """What was measured cannot be measured otherwise."""
    ignored = [name for name in MEASURED if name in given and (name, values[name]) != ("mode", "one-pass")]
    if ignored:
        raise OptionError(
            f"--moments is one pass over text that is measured already, --{ignored[0]} would be ignored; leave one of them out"
        )


def _check_beside_parts(given: set[str]) -> None:
    """What each part has for itself."""
    ignored = [name for name in ALONE if name in given]
    if ignored:
        raise OptionError(
            f"--parts compresses several parts, each with its own sparsity, --{ignored[0]} is of one; leave one of them out"
        )


def usage(error) -> str:
    """The parser's complaint, and where to read on."""
    context = getattr(error, "ctx", None)
    message = error.format_message().strip().rstrip(".")
    return f"{message}; see `{context.command_path if context else 'rankfold'} --help`"


def explain(error: BaseException) -> str | None:
    """One line for an error of the machine; ``None`` where it is one of the program."""
    if isinstance(error, OSError):
        what = "a file" if error.filename is None else repr(error.filename)
        return f"cannot use {what}: {error.strerror or error}; check the name, its permissions and the disk"
    if isinstance(error, MemoryError) or any(text in str(error) for text in ("out of memory", "can't allocate memory")):
        return "out of memory; give fewer or shorter samples, or a machine with more of it"
    return None
