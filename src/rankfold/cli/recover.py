"""`rankfold recover`"""

import re
from pathlib import Path
from typing import Annotated, Literal

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


def command(
    model: o.Compressed,
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
    tune: Annotated[
        Literal["all", "lora", "lora-mlp", "norms"],
        o.of_training(help="What is trained: all weights but embeddings, adapters on all or on MLP layers, or norms."),
    ] = "all",
    loss: Annotated[
        Literal["kl", "next-token", "both"],
        o.of_training(help="Divergence from the dense model's predictions, cross entropy of the text, or both."),
    ] = "kl",
    tokens: Annotated[int, o.of_training(help="Tokens to train on.")] = 1_000_000,
    minutes: Annotated[
        float | None, o.of_training(help="Train on what takes about this long, at most --tokens.")
    ] = None,
    rank: Annotated[int, o.of_training(help="Rank of adapters.")] = 16,
    lr: Annotated[float | None, o.of_training(help="Largest learning rate. Default: measured by a trial step.")] = None,
    batch_tokens: Annotated[int, o.of_training(help="Tokens of a step.")] = 2048,
    max_length: Annotated[int, o.of_calibration(help="Tokens of a sequence.")] = 512,
    tolerance: Annotated[
        float, o.of_training(help="How much the perplexity of a text may rise, as a fraction.")
    ] = 0.02,
    adapter: Annotated[
        bool, o.of_output("--adapter", help="Write a PEFT adapter for the compressed model; do not merge it.")
    ] = False,
    blockwise: Annotated[
        bool,
        o.of_training("--blockwise", help="Train one block at a time to match the dense one; needs little memory."),
    ] = False,
    cache_logits: Annotated[
        Path | None,
        o.of_training(
            help="Folder for the dense model's predictions: computed once, then the dense model is unloaded."
        ),
    ] = None,
    gradient_checkpointing: Annotated[
        bool, o.of_training("--gradient-checkpointing", help="Less memory, one more forward.")
    ] = False,
    report_to: Annotated[
        str, o.of_training(help="Logger of transformers' Trainer, e.g. tensorboard or wandb.")
    ] = "none",
    seed: Annotated[int, o.of_calibration(help="Order of the sequences.")] = 0,
    text_column: Annotated[str, o.of_calibration(help="Column of the text, in a file with rows.")] = "text",
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

    done = recover(
        model,
        teacher,
        calibration=parse_texts(calibration),
        output=output,
        tune=tune,
        loss=loss,
        tokens=tokens,
        minutes=minutes,
        rank=rank,
        lr=lr,
        batch_tokens=batch_tokens,
        max_length=max_length,
        tolerance=tolerance,
        adapter=adapter,
        blockwise=blockwise,
        cache_logits=cache_logits,
        gradient_checkpointing=gradient_checkpointing,
        report_to=report_to,
        seed=seed,
        text_column=text_column,
        device=device,
    )
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
