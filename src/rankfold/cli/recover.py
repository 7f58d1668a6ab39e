"""`rankfold recover`"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from ..data.built_in import DEFAULT_TEXT
from ..errors import OptionError
from . import common as c
from . import options as o
from .calibration import parse_texts
from .config import Recovery
from .rules import MayBePath

TEXTS = [DEFAULT_TEXT]
UNCHANGED = 3  # exit code where the model is what went in


def parse_minutes(time: str | None) -> float | None:
    """Return the minutes of a time such as ``90s``, ``15min`` or ``1.5h``.

    Raises:
        OptionError: it is none, or not more than zero.
    """
    if time is None:
        return None
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)(s|min|h)", time.replace(" ", ""))
    minutes = float(found[1]) * {"s": 1 / 60, "min": 1, "h": 60}[found[2]] if found else 0
    if not minutes:
        raise OptionError(f"--recover takes a time such as 90s, 15min or 1.5h; got {time!r}")
    return minutes


@dataclass(frozen=True)
class TrainingOptions:
    """How a model is trained; each as of :func:`rankfold.recover`."""

    panel: ClassVar = "Training"

    tune: Annotated[
        Literal["all", "lora", "lora-mlp", "norms"],
        typer.Option(help="What is trained: all weights but embeddings, adapters on all or on MLP layers, or norms."),
    ] = "all"
    loss: Annotated[
        Literal["kl", "next-token", "both"],
        typer.Option(help="Divergence from the dense model's predictions, cross entropy of the text, or both."),
    ] = "kl"
    tokens: Annotated[int, typer.Option(help="Tokens to train on.")] = 1_000_000
    minutes: Annotated[float | None, typer.Option(help="Train on what takes about this long, at most --tokens.")] = None
    rank: Annotated[int, typer.Option(help="Rank of adapters.")] = 16
    lr: Annotated[float | None, typer.Option(help="Largest learning rate. Default: measured by a trial step.")] = None
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 2048
    max_length: Annotated[int, o.of_calibration(help="Tokens of a sequence.")] = 512
    tolerance: Annotated[float, typer.Option(help="How much the perplexity of a text may rise, as a fraction.")] = 0.02
    adapter: Annotated[
        bool, o.of_output("--adapter", help="Write a PEFT adapter for the compressed model; do not merge it.")
    ] = False
    blockwise: Annotated[
        bool,
        typer.Option("--blockwise", help="Train one block at a time to match the dense one; needs little memory."),
    ] = False
    cache_logits: Annotated[
        Path | None,
        typer.Option(help="Folder for the dense model's predictions: computed once, then the dense model is unloaded."),
    ] = None
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, one more forward.")
    ] = False
    report_to: Annotated[str, typer.Option(help="Logger of transformers' Trainer, e.g. tensorboard or wandb.")] = "none"
    seed: Annotated[int, o.of_calibration(help="Order of the sequences.")] = 0
    text_column: Annotated[str, o.of_calibration(help="Column of the text, in a file with rows.")] = "text"


@o.expanded
def command(
    model: o.Compressed,
    *,
    output: Annotated[Path, o.of_output("-o", "--output", help="Folder to write; an unfinished run goes on.")],
    config: Recovery = None,
    teacher: Annotated[
        str | None,
        o.of_model(help="The dense model. Default: the one on the hub that it was compressed from."),
        MayBePath(),
    ] = None,
    calibration: Annotated[
        list[str],
        o.of_calibration(metavar="TEXT", help="Texts to train on, as for compress; also TEXT=SHARE. Repeatable."),
        MayBePath(),
    ] = TEXTS,
    training: TrainingOptions,
    device: o.Device = "auto",
    json: o.Json = False,
) -> None:
    """Train a compressed model for a few minutes by distillation.

    It learns to predict what the dense model predicts. Held-out text is scored before, during and after, and the best
    state is kept. Where the texts do not gain on average, one loses more than the tolerance, or a kind of probe text
    loses more than 25 %, the model that went in is written, and the exit code is 3.

    \b
    rankfold recover small -o better --minutes 15
    rankfold recover small -o better --teacher dense --calibration wikitext2 --calibration c4 --tune lora
    rankfold recover small -o again --teacher dense --config better/rankfold.json
    """
    from ..recovery.recover import recover
    from ..report.outcomes import recovery_lines

    texts = parse_texts(calibration)
    done = recover(model, teacher, calibration=texts, output=output, device=device, **vars(training))
    facts = done.record["recovery"]
    result = {"output": str(done.output), "recovered": done.recovered, **{k: facts[k] for k in SHOWN if k in facts}}

    def show(out) -> None:
        out.print(f"{done.output}:", soft_wrap=True)
        for line in recovery_lines(done.record):
            out.print(f"  {line}", soft_wrap=True)
        out.print(f"  {facts['seconds']:.0f} s")

    c.emit(result, json, show)
    if not done.recovered:
        raise typer.Exit(UNCHANGED)


SHOWN = ("held_out", "tokens_seen", "tuned_parameters", "best_step", "blocks", "seconds")
