"""The class of all commands: checks before one runs, its help page, and one line for what the machine refuses."""

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .._utils.processes import from_first
from ..errors import OptionError
from .config import remaining
from .options import PANELS, MethodOptions
from .quiet import quiet_libraries
from .rules import check_rules, flag

UsageError = typer.TyperException  # what the parser raises

# Whose work several processes share; the first one does the others alone.
SHARED = ("compress", "recover", "calibrate", "compare", "evaluate")
# They need no library whose messages were to be kept out: transformers takes seconds.
PRINTING = ("inspect", "methods")

WIDEST = 30  # names of options that stand on the line of their help
HAS_COLUMNS = re.compile(
    r"\.(jsonl|ndjson|json|csv|tsv|parquet)(=[^=/]*)?$|^(\w+=)?hub:", re.IGNORECASE
)  # among names of texts and images


class Commands(TyperGroup):
    """All commands together."""

    def get_params(self, ctx: typer.Context) -> list:
        return _with_defaults(super().get_params(ctx))


class Command(TyperCommand):
    """A command whose arguments are checked before it runs, and whose help page has a section for every panel."""

    def get_params(self, ctx: typer.Context) -> list:
        return _with_defaults(super().get_params(ctx))

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # a line that is being completed: names are asked for, and nothing is to be refused
            values, ctx.args, _ = self.make_parser(ctx).parse_args(args=list(args))
            ctx.params |= values
            return ctx.args
        try:
            rest = super().parse_args(ctx, list(args))
        except UsageError as error:
            if any(word.startswith("--config") for word in args) and "argument 'model'" in error.format_message():
                raise OptionError(
                    "a record has of a local model the name only; give MODEL too, the path of the dense model"
                ) from error
            raise
        order, values = self.make_parser(ctx).parse_args(args=list(args))[2], ctx.params
        for parameter, times in Counter(order).items():
            if times > 1 and not getattr(parameter, "multiple", False):
                raise OptionError(f"{flag(parameter.name)} is given {times} times; give it once")
        given = {str(parameter.name) for parameter in order}
        if values.get("config"):
            values["config"] = [remaining(ctx, settings, given) for settings in values["config"]]
            if len(values["config"]) == 1:
                values |= {name: value for name, value in values["config"][0].items() if name in values}
        for name, value in values.items():
            _check_value(name, value)
        check_rules(ctx, given)
        if "text_column" in given:
            _check_column(values)
        if "method" in values:
            _check_method(given, values)
        return rest

    def invoke(self, ctx: typer.Context) -> Any:
        invoke = super().invoke
        with contextlib.nullcontext() if ctx.info_name in PRINTING else quiet_libraries():
            if ctx.info_name in SHARED:
                return invoke(ctx)
            return from_first(lambda: _code(invoke, ctx))

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {name: [] for name in PANELS}
        unnamed: list[tuple[str, str]] = []  # --help
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                panels.get(getattr(parameter, "rich_help_panel", None) or "", unnamed).append(record)
        last = [name for name, rows in panels.items() if rows][-1:] or ["Options"]
        panels.setdefault(last[0], []).extend(unnamed)
        width = max(len(name) for rows in panels.values() for name, _ in rows if len(name) <= WIDEST)
        for panel, rows in panels.items():
            if rows:
                with formatter.section(panel):
                    formatter.write_dl([(f"{name:<{width}}", text) for name, text in rows])


def _with_defaults(parameters: list) -> list:
    """Give flags without a default one: to check ``None``, typer imports pydantic, half the time of a help page."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.default is None:
            parameter.default = False
    return parameters


def _code(invoke: Callable[[typer.Context], None], ctx: typer.Context) -> int:
    """Return the exit code of a command, which only the first process runs."""
    try:
        invoke(ctx)
    except typer.Exit as stop:
        return stop.exit_code
    return 0


def _check_value(name: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise OptionError(f"{flag(name)} must be a finite number, got {value}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise OptionError(f"{flag(name)} must fit into 64 bits, got {str(value)[:24]}...; choose a smaller number")


def _check_column(values: dict[str, Any]) -> None:
    """Refuse a column where nothing has columns to choose from."""
    names = [*(values.get("calibration") or ()), *(values.get("text") or ())]
    if names and not any(HAS_COLUMNS.search(name) for name in names):
        raise OptionError(
            f"--text-column {values['text_column']} would be ignored, of {' and '.join(names)}; it is of files with "
            "rows, such as .jsonl"
        )


def _check_method(given: set[str], values: dict[str, Any]) -> None:
    """Refuse options of a method that the others leave no use for."""
    from ..methods.config import ignored_options

    method = MethodOptions(**{field.name: values[field.name] for field in fields(MethodOptions)}).parse()
    for name, goes_with in ignored_options(method.describe()).items():
        if name in given:
            raise OptionError(f"{flag(name)} would be ignored, it goes with {goes_with}; leave it out")


def usage(error: UsageError) -> str:
    """Return the parser's complaint, and where to read on."""
    context = getattr(error, "ctx", None)
    message = error.format_message().strip().rstrip(".")
    for reason in getattr(error.__cause__, "errors", list)():  # pydantic's, which does not say what it got
        message = f"{message.partition(',')[0]}, got {reason['input']!r}"
    return f"{message}; see `{context.command_path if context else 'rankfold'} --help`"


def explain(error: BaseException) -> str | None:
    """Return one line for an error of the machine; ``None`` where it is one of the program."""
    if isinstance(error, OSError):
        what = "a file" if error.filename is None else repr(error.filename)
        return f"cannot use {what}: {error.strerror or error}; check the name, its permissions and the disk"
    if isinstance(error, MemoryError) or any(text in str(error) for text in ("out of memory", "can't allocate memory")):
        return "out of memory; give fewer or shorter samples, or a device or machine with more of it"
    return None
