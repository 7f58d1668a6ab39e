"""Hooks of mkdocs: what stands in docstrings for Python's help is turned into Markdown."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Show ``:func:`name``` as code, and drop the ``::`` before an example."""
    html = re.sub(r":(?:func|class|mod|data|meth):<code>~?\.*([\w.]+)</code>", r"<code>\1</code>", html)
    return re.sub(r"<p>::</p>", "", html)
