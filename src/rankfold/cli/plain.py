"""A console that prints what it is given."""

import os
import re

from rich.console import Console

WIDE = 240  # columns of a table that no terminal cuts
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # characters, apart from tabs and line ends


class Plain(Console):
    """Prints strings as they are: a name may have brackets or colons in it, and a path must stay one word. Control
    characters are shown, not sent: strings may come out of a stranger's checkpoint."""

    def __init__(self, file):
        free = not file.isatty() and "COLUMNS" not in os.environ
        super().__init__(file=file, width=WIDE if free else None, highlight=False, markup=False, emoji=False)

    def print(self, *objects, soft_wrap: bool | None = None, **options) -> None:
        wrapped = all(isinstance(item, str) for item in objects) if soft_wrap is None else soft_wrap
        super().print(*objects, soft_wrap=wrapped, **options)

    def render_str(self, text: str, **options):
        return super().render_str(CONTROL.sub(lambda c: c[0].encode("unicode_escape").decode(), text), **options)
