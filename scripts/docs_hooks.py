"""Hooks of mkdocs: short names stay whole, and what stands in docstrings for Python's help is turned into Markdown."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Show ``:func:`name``` as code, drop the ``::`` before an example, and break no line inside a name or a ratio."""
    html = re.sub(r":(?:func|class|mod|data|meth):<code>~?\.*([\w.]+)</code>", r"<code>\1</code>", html)
    html = re.sub(r"<code>([^<\s]{1,30}|[^<]{1,22})</code>", r'<code class="whole">\1</code>', html)
    html = re.sub(r"× (?=\d)|(?<=\d) (?=%)", lambda found: found[0].replace(" ", "\u00a0"), html)
    return re.sub(r"<p>::</p>", "", html)
