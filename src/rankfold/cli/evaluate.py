"""`rankfold evaluate`"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .._utils.sizes import plural
from ..errors import OptionError
from . import common as c
from . import options as o
from .rules import MayBePath, Needs

if TYPE_CHECKING:
    from rich.table import Table


def command(
    model: o.Model,
    *,
    revision: o.Revision = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    text: Annotated[
        list[str] | None,
        o.of_measurements(
            metavar="TEXT", help="Text to compute perplexity on, named as for --calibration. Repeatable."
        ),
        MayBePath(),
    ] = None,
    max_length: Annotated[int, o.of_measurements(help="Tokens per sample."), Needs(("text",))] = 2048,
    text_column: Annotated[
        str, o.of_measurements(help="Column of the text in a file with rows."), Needs(("text",))
    ] = "text",
    tasks: Annotated[
        str | None, o.of_measurements(help="Tasks of lm-eval, e.g. arc_easy,piqa; scienceqa, mmlu_math:5 (5 examples).")
    ] = None,
    include_path: o.IncludePath = None,
    num_fewshot: Annotated[
        int | None,
        o.of_measurements(help="Examples before each question. Default: the task's, mostly 0."),
        Needs(("tasks",)),
    ] = None,
    batch_size: Annotated[int, o.of_measurements(help="Questions in one forward."), Needs(("tasks",))] = 8,
    limit: o.Limit = None,
    generation: o.Generation = False,
    speed: Annotated[bool, o.of_measurements("--speed", help="Tokens per second, memory, bytes, operations.")] = False,
    baseline: Annotated[
        str | None,
        o.of_measurements(help="Another model, mostly the dense one, to compare written text and speed with."),
        MayBePath(),
        Needs(("speed", "generation")),
    ] = None,
    batch_sizes: Annotated[str, o.of_measurements(help="Sequences at a time."), Needs(("speed",))] = "1,8,32",
    stream: Annotated[
        bool, o.of_model("--stream", help="With --text: load one block at a time, for models larger than memory.")
    ] = False,
    json: o.Json = False,
) -> None:
    """Measure perplexity, accuracy on tasks, writing and speed.

    For dense and compressed models; perplexity as for WikiText-2 in the papers, accuracy by lm-eval.

    \b
    rankfold evaluate small --text wikitext2
    rankfold evaluate small --text wikitext2:wiki.test.raw --text my-text.txt --limit 16 --json
    rankfold evaluate small --tasks arc_easy,piqa --include-path rows
    rankfold evaluate small --generation --speed --baseline dense
    """
    model = o.at_revision(model, revision)
    from ..evaluation.cost import Cost
    from ..evaluation.evaluate import evaluate
    from ..evaluation.tasks import Questions
    from ..evaluation.text import Texts
    from ..evaluation.writing import Writing

    names = [name.strip() for name in (tasks or "").split(",")]
    prompts = Writing.limit if limit is None else limit
    result = evaluate(
        model,
        texts=Texts(text, max_length, limit, text_column) if text else None,
        questions=Questions(names, include_path, limit, batch_size, num_fewshot) if tasks is not None else None,
        cost=Cost(baseline, _sizes(batch_sizes)) if speed else None,
        writing=Writing(include_path, prompts, baseline=baseline) if generation else None,
        dtype=dtype,
        device=device,
        stream=stream,
    )
    if len(text or ()) == 1 and tasks is None and not speed and not generation:
        result = {"model": result["model"], **result["texts"][0]}
        c.emit(result, json, lambda out: out.print(_line(result), soft_wrap=True))
    else:
        c.emit(result, json, lambda out: _show(out, result))


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise OptionError(f"--batch-sizes takes numbers such as 1,8,32; got {text!r}") from None


def _line(result: dict) -> str:
    return (
        f"perplexity {result['perplexity']:.2f} on {plural(result['windows'], 'sample')} of "
        f"{plural(result['length'], 'token')} of "
        f"{result['text']} ({result['definition']}){_memory(result)}"
    )


def _memory(result: dict) -> str:
    """Return what a model that was streamed took."""
    found = {"peak memory": result.get("peak_memory_bytes"), "of the device": result.get("peak_device_memory_bytes")}
    return "".join(f"; {what} {size / 2**30:.2f} GiB" for what, size in found.items() if size is not None)


def _show(out, result: dict) -> None:
    for text in result.get("texts", []):
        out.print(f"{_line(text)}; {text['tokens_per_second']:,.0f} tokens/s", soft_wrap=True)
    if "tasks" in result:
        out.print(_tasks(result["tasks"]))
    if "generation" in result:
        out.print(_generation(result["generation"]))
    if "cost" in result:
        models = result["cost"]["models"]
        short = {name: Path(name).name for name in models}
        labels = short if len(set(short.values())) == len(short) else dict(zip(models, models, strict=True))
        out.print(_cost(models, labels))
        out.print(_speed(result["cost"]["batches"], labels))


def _tasks(tasks: dict) -> "Table":
    from rich.table import Table

    table = Table("task", "metric", "value", "standard error", "questions")
    for name, facts in tasks.items():
        parts = {name: facts} | {f"{name} {column}": part for column, part in facts.get("columns", {}).items()}
        for part, numbers in parts.items():
            for metric in [key for key in numbers if f"{key}_stderr" in numbers]:
                value, error = numbers[metric], numbers[f"{metric}_stderr"]
                shown = ["-" if number is None else f"{number:.4f}" for number in (value, error)]
                table.add_row(part, metric, *shown, str(numbers.get("samples", "")))
    return table


def _generation(found: dict) -> "Table":
    from rich.table import Table

    table = Table("generation", "value", "standard error", "prompts")
    for kind, facts in found["exact"].items():
        error = "-" if facts["stderr"] is None else f"{facts['stderr']:.4f}"
        table.add_row(f"{kind}, exact", f"{facts['share']:.4f}", error, str(facts["prompts"]))
    named = {
        "repetition": "repeated 4-grams",
        "distinct": "distinct 2-grams",
        "equal": "tokens as the baseline's",
        "first_difference": "tokens until the first other one",
    }
    for key, name in named.items():
        if found.get(key) is not None:
            table.add_row(name, f"{found[key]:.4g}", "", str(found["texts"]))
    return table


def _cost(models: dict, labels: dict[str, str]) -> "Table":
    from rich.table import Table

    table = Table("", *(labels[name] for name in models))
    for name, key, unit in (
        ("M parameters", "parameters", 1e6),
        ("MiB on disk", "bytes_on_disk", 2**20),
        ("KV-cache bytes per token", "kv_bytes_per_token", 1),
        ("M MACs per token", "macs_per_token", 1e6),
        ("M FLOPs per token", "flops_per_token", 1e6),
    ):
        values = [facts[key] for facts in models.values()]
        table.add_row(name, *("-" if v is None else f"{v / unit:,.{0 if unit == 1 else 1}f}" for v in values))
    return table


def _speed(batches: list[dict], labels: dict[str, str]) -> "Table":
    from rich.table import Table

    from ..evaluation.speed import RATIOS

    columns = ["batch", "model", "prefill tokens/s", "decode tokens/s", "first token, ms", "peak memory, MiB"]
    compared = len(labels) > 1
    if compared:
        columns.append("ratios, prefill and decode")
    table = Table(*columns, caption=RATIOS if compared else None, caption_justify="left")
    for batch in batches:
        for name, facts in batch["models"].items():
            peak = facts["peak_memory_bytes"]
            table.add_row(
                str(batch["batch"]),
                labels[name],
                *(_spread(facts, kind) for kind in ("prefill", "decode")),
                f"{facts['first_token_seconds'] * 1e3:,.1f}",
                "-" if peak is None else f"{peak / 2**20:,.0f}",
                *([f"{facts['prefill_ratio']:.2f}, {facts['decode_ratio']:.2f}"] if compared else []),
            )
    return table


def _spread(facts: dict, kind: str) -> str:
    low, high = facts[f"{kind}_range"]
    return f"{facts[f'{kind}_tokens_per_second']:,.0f} [{low:,.0f}, {high:,.0f}]"
