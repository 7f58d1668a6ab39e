"""`rankfold export`"""

from pathlib import Path
from typing import Annotated

import typer

from ..data.built_in import DEFAULT_TEXT
from . import common as c
from . import options as o
from .calibration import parse_texts
from .rules import MayBePath
from .summary import show_kept

TEXTS = [DEFAULT_TEXT]


def command(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="Folder that `rankfold compress` wrote, or its hub id; for GGUF and deci also a dense model.",
            rich_help_panel="Model",
        ),
    ],
    output: Annotated[Path, o.of_output("-o", "--output", help="Folder or file to write; must not exist.")],
    format: Annotated[
        str, o.of_output(help="stock, deci, gguf or gguf-deci; docs/serve.md has what reads which.")
    ] = "stock",
    dtype: Annotated[
        str, o.of_output(help="auto (as stored), float32, bfloat16 or float16; GGUF files also q8_0, q5_0 and q4_0.")
    ] = "auto",
    calibration: Annotated[
        list[str],
        o.of_calibration(
            metavar="TEXT", help="Texts that q5_0 and q4_0 are rounded for, as for compress; also TEXT=SHARE."
        ),
        MayBePath(),
    ] = TEXTS,
    num_samples: Annotated[int, o.of_calibration(help="Samples of all texts together.")] = 32,
    max_length: Annotated[int, o.of_calibration(help="Tokens per sample, at most the model's context.")] = 2048,
    seed: Annotated[int, o.of_calibration(help="Order in which samples are drawn.")] = 0,
    text_column: Annotated[str, o.of_calibration(help="Column of the text, in a file with rows.")] = "text",
    revision: o.Revision = None,
    json: o.Json = False,
) -> None:
    """Write a checkpoint for programs without rankfold.

    \b
    rankfold export small -o stock
    rankfold export small -o small.gguf --format gguf --dtype q8_0
    rankfold export small -o small.gguf --format gguf-deci --dtype q4_0 --calibration c4
    rankfold export dense.gguf -o q4.gguf --format gguf --dtype q4_0
    """
    from ..exports import RoundingText, export

    texts = DEFAULT_TEXT if calibration == TEXTS else parse_texts(calibration)
    text = RoundingText(texts, num_samples, max_length, seed, text_column)
    checkpoint = o.at_revision(checkpoint, revision)
    done = export(checkpoint, output, format, dtype=dtype, text=text)
    result = {
        "output": str(done.output),
        "format": done.format,
        "parameters": {"dense": done.dense, "compressed": done.compressed, "exported": done.exported},
        "saving_kept": done.kept,
        "difference": done.difference,
    }

    def show(out) -> None:
        read_back = f"read back, its logits differ by {done.difference:.1e} of their norm"
        if done.dense == done.compressed:
            out.print(f"{done.output}: {done.exported:,} parameters, of a dense model; {read_back}")
            return
        out.print(
            f"{done.output}: parameters {done.dense:,} dense, {done.compressed:,} compressed, "
            f"{done.exported:,} exported"
        )
        out.print(f"{done.kept:.0%} of the saving kept; {read_back}")
        show_kept(done.kept, done.exported, done.format, Path(checkpoint).expanduser(), out)

    c.emit(result, json, show)
