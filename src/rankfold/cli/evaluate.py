"""`rankfold evaluate`"""

from typing import Annotated

import typer

from . import common as c
from . import options as o


def command(
    model: o.Model,
    text: Annotated[str, typer.Option(help="Text to evaluate on; sources as for --calibration.")],
    length: Annotated[int, typer.Option(help="Window length.")] = 2048,
    limit: Annotated[int | None, typer.Option(help="Only the first N windows.")] = None,
    field: o.Field = "text",
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    json: o.Json = False,
) -> None:
    """Perplexity, computed as the field does for WikiText-2. Works for dense and compressed models.

    \b
    rankfold evaluate small --text wikitext2
    rankfold evaluate small --text wikitext2:wiki.test.raw --limit 16
    rankfold evaluate small --text my-text.txt --length 1024 --json
    """
    from ..evaluation.text import evaluate_text

    result = evaluate_text(model, text, length=length, limit=limit, field=field, dtype=dtype, device=device)
    c.emit(
        result,
        json,
        lambda out: out.print(
            f"perplexity {result['perplexity']:.2f} on {result['windows']} windows of {result['length']} tokens of "
            f"{text} ({result['definition']})",
            soft_wrap=True,
        ),
    )
