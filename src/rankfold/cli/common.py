"""Printing that several commands share."""

import json
import os
import re
import sys

from rich.console import Console

from ..report.outcomes import excess_of

WIDE = 240  # columns of a table that no terminal cuts
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # characters, apart from tabs and line ends


class Plain(Console):
    """Prints strings as they are: a name may have brackets or colons in it, and a path must stay one word. What would steer a
    terminal is shown, not sent: strings may come out of a stranger's checkpoint."""

    def __init__(self, file):
        free = not file.isatty() and "COLUMNS" not in os.environ
        super().__init__(file=file, width=WIDE if free else None, highlight=False, markup=False, emoji=False)

    def print(self, *objects, soft_wrap: bool | None = None, **options) -> None:
        wrapped = all(isinstance(item, str) for item in objects) if soft_wrap is None else soft_wrap
        super().print(*objects, soft_wrap=wrapped, **options)

    def render_str(self, text: str, **options):
        return super().render_str(CONTROL.sub(lambda c: c[0].encode("unicode_escape").decode(), text), **options)


def console() -> Console:
    """For everything that is not the result."""
    return Plain(sys.stderr)


def emit(result: dict, as_json: bool, human) -> None:
    """Print the result: one JSON object on stdout, or whatever ``human(console)`` prints there."""
    if as_json:
        print(json.dumps(result, allow_nan=False))  # escaped: not every terminal, and no lone surrogate, is UTF-8
    else:
        human(Plain(sys.stdout))


def result_of(record: dict) -> dict:
    """What a run record says in a few numbers."""
    seconds = dict(record["run"]["seconds"])
    spent = {"seconds": seconds.pop("total"), "seconds_by_part": seconds}
    found = {key: record.get(key) for key in ("held_out", "probe_texts")}
    found |= {key: record[key] for key in ("recovery", "goal") if key in record}
    return {**record["counts"], **spent, "excess": excess_of(record), **found}


def where_time_went(total: float, parts: dict[str, float]) -> str:
    """One line on the seconds of a run."""
    digits = 1 if total < 100 else 0
    spent = ", ".join(f"{name.replace('_', ' ')} {seconds:.{digits}f}" for name, seconds in parts.items())
    return f"{total:.{digits}f} s: {spent}" if parts else f"{total:.{digits}f} s"
