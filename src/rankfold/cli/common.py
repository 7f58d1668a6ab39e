"""Options and printing that several commands share."""

import json
import math
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import OptionError
from ..methods import Method, make_method
from ..methods.base import method_class

SHARED = {f.name for f in fields(Method)}  # options with a flag of their own

Model = Annotated[str, typer.Argument(help="Hub id, local folder, or local .gguf file.")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]
Calibration = Annotated[
    str,
    typer.Option(
        help="wikitext2, ptb, c4, alpaca (from the hub, or ALIAS:FILE for a local copy of the rows), a .txt/.jsonl/.parquet "
        "file, pydoc (ships with Python), or self (text the model writes)."
    ),
]
Field = Annotated[str, typer.Option(help="Column with the text, for .jsonl and .parquet.")]
Samples = Annotated[int, typer.Option(help="Calibration windows.")]
Length = Annotated[int, typer.Option(help="Tokens per window; clamped to the model's context.")]
Seed = Annotated[int, typer.Option(help="Order in which windows are drawn.")]
MethodName = Annotated[str, typer.Option("--method", help="Compression method.")]
Sparsity = Annotated[float, typer.Option(help="Fraction of the weights to remove, in [0, 1).")]
Of = Annotated[str, typer.Option(help="What --sparsity counts: the linear weights of the blocks, or the whole model.")]
Modules = Annotated[
    str | None,
    typer.Option(help="Modules to compress, e.g. mlp,qk,vo; or with own sparsities: mlp=0.35,vo=0.2. Default: all."),
]
Allocation = Annotated[str, typer.Option(help="uniform, influence or influence-modules.")]
Epsilon = Annotated[float | None, typer.Option(help="Temperature of the influence allocations. Default: the 0.8 rule.")]
Multiple = Annotated[int, typer.Option(help="Ranks are multiples of this.")]
Protect = Annotated[str, typer.Option(help="Blocks left dense, e.g. 0,-1.")]
Option = Annotated[list[str] | None, typer.Option(help="Option of the method, KEY=VALUE; repeatable.")]
Moments = Annotated[Path | None, typer.Option(help="Folder written by `rankfold calibrate`; no calibration then.")]


def parse_method(
    name: str,
    sparsity: float,
    of: str,
    modules: str | None,
    allocation: str,
    epsilon,
    multiple: int,
    protect: str,
    option,
) -> Method:
    """The method the options describe.

    Raises:
        OptionError: an option that does not parse or is out of range.
    """
    shared = {"sparsity": sparsity, "of": of, "allocation": allocation, "epsilon": epsilon, "multiple": multiple}
    shared["modules"] = _parse_modules(modules)
    try:
        shared["protect"] = tuple(int(b) for b in protect.split(",") if b)
    except ValueError:
        raise OptionError(f"--protect takes block numbers such as 0,-1; got {protect!r}") from None
    return make_method(name, **shared, **_parse_options(name, option or []))


def _parse_modules(text: str | None):
    if text is None:
        return None
    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not parts:
        raise OptionError("--modules is empty; e.g. mlp,qk,vo")
    names = [p.split("=", 1)[0].strip() for p in parts]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise OptionError(f"--modules names {twice[0]!r} more than once; name it once")
    if not any("=" in p for p in parts):
        return tuple(parts)
    try:
        return {name: float(p.split("=", 1)[1]) for name, p in zip(names, parts, strict=True)}
    except (ValueError, IndexError):
        raise OptionError(f"--modules takes mlp,qk,vo or mlp=0.35,vo=0.2 (all with a sparsity); got {text!r}") from None


def _parse_options(method: str, options: list[str]) -> dict:
    cls = method_class(method)
    defaults = {f.name: f.default for f in fields(cls)}
    parsed = {}
    for item in options:
        key, equals, value = item.partition("=")
        if not equals:
            raise OptionError(f"--option takes KEY=VALUE, got {item!r}")
        if key in SHARED:
            raise OptionError(f"{key!r} is an option of every method: give it as --{key}, not as --option {item}")
        if key in parsed:
            raise OptionError(f"--option gives {key!r} more than once; give it once")
        parsed[key] = _like(defaults.get(key), value, item)
    return parsed


def _like(default, value: str, item: str):
    """``value`` as the type of the option's default."""
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise OptionError(f"--option {item!r}: expected true or false")
        return value.lower() == "true"
    if isinstance(default, int | float):
        try:
            number = type(default)(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            kind = "number" if isinstance(default, float) else "whole number"
            raise OptionError(f"--option {item!r}: expected a finite {kind}")
        return number
    return value


class Plain(Console):
    """Prints strings as they are: a name may have brackets or colons in it, and a path must stay one word."""

    def __init__(self, file):
        super().__init__(file=file, highlight=False, markup=False, emoji=False)

    def print(self, *objects, soft_wrap: bool | None = None, **options) -> None:
        wrapped = all(isinstance(item, str) for item in objects) if soft_wrap is None else soft_wrap
        super().print(*objects, soft_wrap=wrapped, **options)


def console() -> Console:
    """For everything that is not the result."""
    return Plain(sys.stderr)


def emit(result: dict, as_json: bool, human) -> None:
    """Print the result: one JSON object on stdout, or whatever ``human(console)`` prints there."""
    if as_json:
        print(json.dumps(result, allow_nan=False))  # escaped: not every terminal, and no lone surrogate, is UTF-8
    else:
        human(Plain(sys.stdout))


def outcome(held_out: dict) -> str:
    """What became of the calibration windows that were not fitted."""
    numbers = "perplexity {perplexity_dense:.2f} -> {perplexity:.2f} (x {ratio:.2f}) on {windows} held-out calibration windows"
    return numbers.format(**held_out)
