"""`rankfold generate`"""

from typing import Annotated

import typer

from . import common as c
from . import options as o


def command(
    model: o.Model,
    prompt: Annotated[str, typer.Argument(help="Text to continue.", rich_help_panel="Model")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 64,
    temperature: o.Temperature = 0.0,
    seed: o.SamplingSeed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    revision: o.Revision = None,
    json: o.Json = False,
) -> None:
    """Continue a prompt, with a dense or compressed model.

    \b
    rankfold generate small "The capital of France is"
    """
    model = o.at_revision(model, revision)
    from ..evaluation.generation import generate_text

    text = generate_text(
        model, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, dtype=dtype, device=device
    )
    c.emit({"model": model, "prompt": prompt, "text": text}, json, lambda out: out.print(prompt + text, markup=False))
