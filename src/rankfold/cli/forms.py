"""Methods with options in one argument: ``rankfold,modegpt:selection=leverage,gqa=paper,svd``."""

import math
from dataclasses import fields
from typing import TYPE_CHECKING

from ..errors import OptionError, check_choice
from ..methods import make_method, method_class
from .options import parse_as, parse_modules

if TYPE_CHECKING:
    from ..comparison import Form


def parse_forms(text: str) -> "list[Form]":
    """Parse methods, ``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE`` separated by commas; ``+`` stands for a comma in a value.

    A part with a ``=`` and no ``:`` before it belongs to the method before it.

    Raises:
        OptionError: unknown method or option (with a suggestion), or a value of the wrong kind.
    """
    groups: list[tuple[str, list[str]]] = []
    for part in (part.strip() for part in text.split(",")):
        name, colon, option = part.partition(":")
        if "=" in name and groups:
            groups[-1][1].append(part)
        elif name:
            groups.append((name, [option] if colon else []))
        else:
            raise OptionError(f"--methods takes names such as rankfold,modegpt:gqa=paper,svd; got {text!r}")
    return [_form(name, options) for name, options in groups]


def _form(name: str, listed: list[str]) -> "Form":
    method_class(name)
    options, mode = {}, None
    for item in listed:
        key, equals, value = item.partition("=")
        if not equals:
            raise OptionError(f"--methods: an option of {name} is KEY=VALUE, got {item!r}")
        if key in options or (key == "mode" and mode is not None):
            raise OptionError(f"--methods gives {key!r} of {name} more than once; give it once")
        if key == "mode":
            mode = value
        else:
            options[key] = _value(name, key, value, item)
    from ..methods.config import ignored_options

    for key, goes_with in ignored_options(make_method(name, **options).describe()).items():
        if key in options:
            raise OptionError(f"--methods: {key} of {name} would be ignored, it goes with {goes_with}; leave it out")
    from ..comparison import Form

    return Form(name, options, mode)


def _value(name: str, key: str, value: str, item: str):
    known = {f.name: f.default for f in fields(method_class(name)) if f.name != "sparsity"}
    if key == "sparsity":
        raise OptionError(f"the sparsities of all methods are given by --sparsities, not by {item!r}")
    check_choice(f"{name} option", key, [*known, "mode"])
    if key == "modules":
        return parse_modules(value.replace("+", ","))
    if key == "exclude_blocks":
        return tuple(parse_as(0, block, item, "--methods") for block in value.split("+"))
    typed = parse_as(known[key], value, item, "--methods")
    return typed.replace("+", ",") if isinstance(typed, str) else typed


def parse_sparsities(text: str) -> list[float]:
    """Parse sparsities, numbers separated by commas.

    Raises:
        OptionError: no numbers, or one out of range.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(0 < value < 1 for value in found):
        raise OptionError(f"--sparsities takes numbers in (0, 1) such as 0.1,0.3,0.5; got {text!r}")
    return found
