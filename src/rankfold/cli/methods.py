"""`rankfold methods`"""

import inspect
import re
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from ..errors import written
from ..methods import METHODS, make_method, method_class, method_names
from . import common as c
from . import options as o

ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n(?:     .*|$))*)", re.MULTILINE)  # an entry of a docstring's list
SENTENCE_END = re.compile(r"(?<!\bApp)(?<!\bSec)(?<!\bEq)\. ")
ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`|``")


def command(
    name: Annotated[
        str | None,
        typer.Argument(help="Method whose options are listed.", rich_help_panel="Method", autocompletion=method_names),
    ] = None,
    json: o.Json = False,
) -> None:
    """List the compression methods, or the options of one.

    \b
    rankfold methods
    rankfold methods modegpt
    """
    if name is not None:
        rows = options_of(name)
        return c.emit({"method": name, "options": rows}, json, lambda out: out.print(c.table_of(rows)))
    rows = [
        {"method": name, "what it does": entry.summary, "paper": f"arXiv:{entry.paper}" if entry.paper else ""}
        for name, entry in METHODS.items()
    ]
    c.emit({"methods": rows}, json, lambda out: out.print(c.table_of(rows)))


def options_of(name: str) -> list[dict[str, str]]:
    """Return every option of a method, its own first: how it is given, its type, its default, and what it is.

    Raises:
        OptionError: there is no such method.
    """
    cls = method_class(name)
    defaults = make_method(name).describe()
    about = {key: text for base in reversed(cls.__mro__) for key, text in _attributes(base)}
    flags = {key: hint.__metadata__[0].help for key, hint in o.hints_of(o.MethodOptions).items()}
    return [
        {
            "option": f"--{field.name.replace('_', '-')}" if field.name in flags else f"--set {field.name}=",
            "type": _type(field.type),
            "default": "" if defaults[field.name] is None else written(defaults[field.name]),
            "what it is": flags.get(field.name) or about.get(field.name, ""),
        }
        for field in sorted(fields(cls), key=lambda field: field.name in flags)
    ]


def _attributes(cls: type) -> list[tuple[str, str]]:
    """Return the attributes in the docstring of a class, each with its first sentence."""
    _, _, listed = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")
    found = [(name, " ".join(ROLE.sub(r"\1", text).split())) for name, text in ATTRIBUTE.findall(listed)]
    return [(name, SENTENCE_END.split(text)[0].rstrip(".")) for name, text in found]


def _type(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else re.sub(r"\b(\w+\.)+", "", str(hint))
