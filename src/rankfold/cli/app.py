"""All commands together."""

import importlib
import logging
import sys
from typing import Annotated

import typer

from .._utils.processes import is_first
from ..errors import called_by
from ..version import __version__
from .command import Command, Commands

# In the order of the help page; each is a module here.
NAMES = (
    *("compress", "recover", "calibrate", "plan", "evaluate", "compare", "export"),
    *("push", "generate", "chat", "inspect", "models", "methods"),
)

app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
for name in NAMES:
    module = importlib.import_module(f".{name}", __package__)
    app.command(name=name, cls=Command)(module.command)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rankfold {__version__}")
        raise typer.Exit


@app.callback()
def setup(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Shrink Hugging Face language models in minutes, without training, and load the result with from_pretrained."""
    context.with_resource(called_by("compare" if context.invoked_subcommand == "compare" else "command"))
    level = logging.INFO if is_first() else logging.CRITICAL
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    for name in ("httpx", "httpx2", "datasets", "huggingface_hub", "transformers", "fsspec", "lm_eval", "gguf"):
        logging.getLogger(name).setLevel(logging.ERROR)
