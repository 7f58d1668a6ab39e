"""All commands together."""

import logging
import sys
from typing import Annotated

import typer

from ..errors import called_by
from ..progress import without_bars
from ..version import __version__
from . import calibrate, compare, compress, evaluate, export, generate, inspect, models, plan
from .guard import Command

app = typer.Typer(
    help="Shrink any Hugging Face language model in minutes, without training, and load the result anywhere.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (compress, calibrate, plan, evaluate, compare, export, generate, inspect, models):
    app.command(name=module.__name__.rpartition(".")[2], cls=Command)(module.command)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rankfold {__version__}")
        raise typer.Exit


@app.callback()
def setup(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version and stop.")
    ] = False,
) -> None:
    context.with_resource(called_by("compare" if context.invoked_subcommand == "compare" else "command"))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in ("httpx", "httpx2", "datasets", "huggingface_hub", "transformers", "fsspec", "lm_eval", "gguf"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.stderr.isatty():  # bars of the loaders do not belong into log files
        context.with_resource(without_bars())
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
