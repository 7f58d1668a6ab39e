"""`rankfold export`"""

from pathlib import Path
from typing import Annotated

import typer

from . import common as c
from . import options as o
from .summary import show_kept


def command(
    checkpoint: Annotated[
        str, typer.Argument(help="Folder that `rankfold compress` wrote, or its hub id.", rich_help_panel="Model")
    ],
    output: Annotated[Path, o.of_output("-o", "--output", help="Folder or file to write; must not exist.")],
    format: Annotated[
        str, o.of_output(help="stock, deci, gguf or gguf-deci; docs/serve.md has what reads which.")
    ] = "stock",
    dtype: Annotated[
        str, o.of_output(help="auto (as stored), float32, bfloat16 or float16; GGUF files also q8_0.")
    ] = "auto",
    revision: o.Revision = None,
    json: o.Json = False,
) -> None:
    """Write a checkpoint for programs without rankfold.

    \b
    rankfold export small -o stock
    rankfold export small -o small.gguf --format gguf --dtype q8_0
    """
    from ..exports import export

    checkpoint = o.at_revision(checkpoint, revision)

    done = export(checkpoint, output, format, dtype=dtype)
    result = {
        "output": str(done.output),
        "format": done.format,
        "parameters": {"dense": done.dense, "compressed": done.compressed, "exported": done.exported},
        "saving_kept": done.kept,
        "difference": done.difference,
    }

    def show(out) -> None:
        out.print(
            f"{done.output}: parameters {done.dense:,} dense, {done.compressed:,} compressed, "
            f"{done.exported:,} exported"
        )
        out.print(
            f"{done.kept:.0%} of the saving kept; read back, its logits differ by {done.difference:.1e} of their norm"
        )
        show_kept(done.kept, done.exported, done.format, Path(checkpoint).expanduser(), out)

    c.emit(result, json, show)
