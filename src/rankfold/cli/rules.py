"""What an option needs and what it leaves no use for: rules in the ``Annotated`` type of that option."""

import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from .._utils.present import present
from ..errors import OptionError

HOME = re.compile("(?:^|[:=])(~[^/=]+)")  # of another user: ~name/x, ALIAS:~name/x, COMPONENT=~name/x


@dataclass(frozen=True)
class Needs:
    """Refuse the option unless one of these is given too: nothing would read it."""

    others: tuple[str, ...]

    def check(self, name: str, given: set[str], values: Mapping[str, Any], chosen: set[str]) -> None:
        if name in given and not chosen & {*self.others}:
            beside = " or ".join(map(flag, self.others))
            raise OptionError(f"{flag(name)} would be ignored without {beside}; give both or neither")


@dataclass(frozen=True)
class Excludes:
    """Refuse these next to the option, for a reason that names the one that was given as ``{}``."""

    others: tuple[str, ...]
    reason: str
    agrees: tuple[str, Any] | None = None  # an option and the one value that says the same

    def check(self, name: str, given: set[str], values: Mapping[str, Any], chosen: set[str]) -> None:
        if values[name] is None:
            return
        for other in self.others:
            if other in given and (other, values[other]) != self.agrees:
                raise OptionError(self.reason.format(flag(other)))


@dataclass(frozen=True)
class MayBePath:
    """Refuse the home of a user who is not there."""

    def check(self, name: str, given: set[str], values: Mapping[str, Any], chosen: set[str]) -> None:
        value = values[name]
        for place in value if isinstance(value, list | tuple) else [value]:
            _check_home(name, place)


def _check_home(name: str, place: object) -> None:
    home = HOME.search(str(place))
    if home and os.path.expanduser(home[1]) == home[1]:
        label = "MODEL" if name == "model" else flag(name)
        raise OptionError(f"{label}: there is no user whose home is {home[1]!r}; write the path out")


def check_rules(context: typer.Context, given: set[str]) -> None:
    """Check every option of a command against its own rules, and let `~` be the home in every path.

    Args:
        given: the options on the command line; others may come from the defaults that a record sets.

    Raises:
        OptionError: an option that nothing would read, or a path that leads nowhere.
    """
    for name, value in context.params.items():
        if isinstance(value, Path):  # a shell leaves --output=~/small as it is, and so does a file of --config
            _check_home(name, value)
            context.params[name] = value.expanduser()
    chosen = given | {name for name, value in (context.default_map or {}).items() if value}
    for name, parameter in inspect.signature(present(context.command.callback), eval_str=True).parameters.items():
        for rule in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(rule, Needs | Excludes | MayBePath):
                rule.check(name, given, context.params, chosen)


def flag(name: str | None) -> str:
    """Return a parameter as it is written on the command line."""
    return f"--{str(name).replace('_', '-')}"
