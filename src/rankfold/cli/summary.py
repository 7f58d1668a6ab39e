"""What came out of a compression, what an export keeps of it, and the commands to go on with."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from ..methods import make_method
from ..report.goal import goal_line
from ..report.outcomes import before_training, excess_of, held_out_row, kind_rows, size_rows
from . import common as c

if TYPE_CHECKING:
    from rich.console import Console

Record = Mapping[str, Any]  # of a run

_FOR_STOCK = "divergence_for_stock"  # what the plan expects with these ranks
MOST = 0.995  # of the saving: what a line is not worth
TARGETS = {"stock": "stock", "gguf": "stock", "deci": "llama.cpp", "gguf-deci": "llama.cpp"}  # of each format
HEADS = {"qk", "vo", "heads"}  # modules that such a target leaves dense


def show_result(what: str, record: Record, out: "Console") -> None:
    """Print what came out of a run: how much is removed, then :func:`show_numbers`."""
    made = f"{what}: {record['base_model']} by {record['method']}, {removed(record['counts'])}"
    out.print(made, soft_wrap=True)
    show_numbers(record, out)


def removed(counts: Record) -> str:
    """Return the fraction of the counted weights that is removed, and how."""
    how = "set to zero" if "zeros" in counts else "removed"
    return f"{counts['sparsity']:.2%} of the {counts['counted_weights']:,} counted weights {how}"


def show_numbers(record: Record, out: "Console") -> None:
    """Print the dense and the compressed model side by side: sizes and perplexity; then where the time went.

    The second of several components is compared with the model in which the first one is compressed.
    """
    if goal := goal_line(record):
        out.print(goal, soft_wrap=True)
    if excess := excess_of(record):
        out.print(excess)
    for line in side_by_side(record):
        out.print(line, soft_wrap=True)
    if reason := (record.get("probe_texts") or {}).get("skipped"):
        out.print(f"  probe texts: not measured ({reason})", soft_wrap=True)
    seconds = dict(record["run"]["seconds"])
    out.print(f"  {c.where_time_went(seconds.pop('total'), seconds)}", soft_wrap=True)


def side_by_side(record: Record) -> list[str]:
    """Return the lines of the table: sizes, then perplexities of held-out samples and of probe texts."""
    rows = [("", "before" if "before" in record else "dense", "compressed", ""), *size_rows(record["plan"])]
    if held_out := record.get("held_out"):
        row = held_out_row(held_out)
        rows.append((f"{row[0]} {before_training(record, 'held_out')}".rstrip(), *row[1:]))
    when = before_training(record, "probe_texts")
    rows += [(f"  {kind} {when}".rstrip(), *numbers) for kind, *numbers in kind_rows(record.get("probe_texts"))]
    name, dense, small, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [f"  {row[0]:<{name}}  {row[1]:>{dense}}  {row[2]:>{small}}  {row[3]}".rstrip() for row in rows]


def show_next(folder: Path, record: Record, out: "Console", *, engine: str | None, has_stock: bool) -> None:
    """Print the commands that a result is for; ``engine`` is that of :func:`engine_of`."""
    path = f"./{folder}" if str(folder).startswith("-") else str(folder)  # not an option
    place, name = shlex.quote(path), shlex.quote(folder.name)
    commands = {}
    if "perplexity" in (record.get("held_out") or {}):
        commands[f"rankfold evaluate {place} --text wikitext2"] = "perplexity on other text"
        if (folder / "chat_template.jinja").exists():
            commands[f"rankfold chat {place}"] = "chat with it"
        else:
            commands[f'rankfold generate {place} "Once upon a time"'] = "continue a text"
    if engine == "llama.cpp":
        file = shlex.quote(f"{path}.gguf")
        dtype, is_one_width = _dtype_of_file(record), record["plan"]["method"]["target"] == "stock"
        how = f"--format {'gguf' if is_one_width else 'gguf-deci'}{f' --dtype {dtype}' if dtype else ''}"
        commands[f"rankfold export {place} -o {file} {how}"] = "a file for llama.cpp"
    elif engine == "vllm":
        commands[f"vllm serve {place}"] = "serve it"
    elif has_stock:
        commands[f"rankfold export {place} -o {shlex.quote(f'{path}-stock')}"] = "an ordinary model"
    commands[f"rankfold push {place} OWNER/{name}"] = "share it on the Hugging Face hub"
    width = max(map(len, commands))
    out.print("next:", *(f"  {line:<{width}}  {what}" for line, what in commands.items()), sep="\n")


def engine_of(folder: Path, record: Record) -> str | None:
    """Return the engine that a run is for where it runs the result, and reads something else than a stock model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from ..exports.llama_cpp import OF_DECI
    from ..exports.vllm import why_refused
    from ..models.whole import read_config

    if _dtype_of_file(record):
        return "llama.cpp"
    target = record["plan"]["method"]["target"]
    if target not in ("vllm", "llama.cpp"):
        return None
    config = read_config(folder)
    if target == "llama.cpp":
        return target if config.model_type in OF_DECI else None
    writes = {*(config.architectures or ())} <= {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    is_text_model = writes and config.get_text_config() is config  # no encoder, and nothing that sees
    modules = getattr(config, "quantization_config", {}).get("modules", {})  # none where all stay dense
    return target if is_text_model and why_refused(config, modules) is None else None


def _dtype_of_file(record: Record) -> str | None:
    """Return the dtype of the GGUF file whose size was asked for, if one was."""
    return (record.get("goal") or {}).get("dtype")


def exported_as_stock(folder: Path, record: Record) -> dict[str, Any] | None:
    """Return what a stock export of a result would keep; ``None`` where there is none, or nothing was saved."""
    from ..exports.kept import stock_parameters

    if "before" in record or record["plan"].get("part") not in (None, "language"):
        return None
    exported, dense, now = stock_parameters(folder), record["plan"]["parameters"], record["counts"]["parameters"]
    if exported is None or dense <= now:
        return None
    return {"parameters": exported, "saving_kept": max(0.0, (dense - exported) / (dense - now))}


def show_kept(kept: float, parameters: int, format: str, folder: Path, out: "Console") -> None:
    """Print one line on what is left of the saving, the options that keep it, and what that costs by the plan.

    Args:
        kept: part of the saving.
        parameters: of the export.
        format: of the export.
        folder: of the compressed checkpoint; nothing is known of a target where it has no record.
        out: console.
    """
    from ..report.record import read_record

    if kept >= MOST:
        return
    line = f"export --format {format} pads it to {parameters:,} parameters: {kept:.0%} of the saving is left"
    record = read_record(folder) if (folder / "rankfold.json").exists() else None
    if record and _can_reach(record, TARGETS[format]) and (options := options_for_target(record, TARGETS[format])):
        line += f"; compress with {options} to keep all of it{_cost(record, TARGETS[format])}"
    out.print(line, soft_wrap=True)


def _can_reach(record: Record, target: str) -> bool:
    """Tell whether ranks of a target reach the sparsity, as far as a plan has tried: configs say some widths only."""
    plan = record["plan"]
    return not (target == "stock" and plan["method"]["allocation"] == "measured") or _FOR_STOCK in plan["facts"]


def options_for_target(record: Record, target: str) -> str | None:
    """Return the options that choose the ranks of a target; ``None`` where the method of a checkpoint has none.

    Args:
        record: of the run.
        target: one that leaves heads dense.
    """
    method = record["plan"]["method"]
    options: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in method.items()}
    uniform = {"allocation": "uniform", "exclude_blocks": ()} if target == "stock" else {}
    try:
        make_method(options.pop("method"), **options | {"target": target} | uniform)
    except OptionError:
        return None
    if "before" in record or HEADS & {*(method["modules"] or ())} or method["target"] == target:
        return None
    flags = [*(["--allocation uniform"] if uniform else []), f"--target {target}"]
    return f"`{' '.join(flags)}`" + (" and without --exclude-blocks" if uniform and method["exclude_blocks"] else "")


def _cost(record: Record, target: str) -> str:
    """Name the expected divergence of both models, where ranks were chosen by it."""
    facts = record["plan"]["facts"]
    if target != "stock" or not {_FOR_STOCK, "divergence"} <= facts.keys():
        return ""
    return (
        f", at an expected divergence from the dense model of {facts[_FOR_STOCK]:.3g} nats a token in "
        f"place of {sum(facts['divergence'].values()):.3g}"
    )
