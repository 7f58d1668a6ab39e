"""What came out of a compression, what an export keeps of it, and the commands to go on with."""

import shlex
from pathlib import Path

from ..errors import OptionError
from ..methods import make_method
from ..report.outcomes import kinds_in, ratio_text, remark_on
from . import common as c

__all__ = ["exported_as_stock", "options_for_target", "show_kept", "show_next", "show_result"]

MOST = 0.995  # of the saving: what a line is not worth
TARGETS = {"stock": "stock", "gguf": "stock", "deci": "llama.cpp", "gguf-deci": "llama.cpp"}  # of each format
HEADS = {"qk", "vo", "heads"}  # modules that such a target leaves dense


def show_result(what: str, record: dict, out) -> None:
    """Print the dense and the compressed model side by side: size, cache and perplexity."""
    result, plan = c.result_of(record), record["plan"]
    out.print(
        f"{what}: {record['base_model']} by {record['method']}, {result['sparsity']:.2%} of the counted weights "
        f"{c.gone(result)}",
        soft_wrap=True,
    )
    if result["excess"]:
        out.print(result["excess"])
    rows = [("", "dense", "compressed", ""), *_sizes(plan), *_likelihoods(result)]
    name, dense, small, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    for row in rows:
        line = f"  {row[0]:<{name}}  {row[1]:>{dense}}  {row[2]:>{small}}  {row[3]}"
        out.print(line.rstrip(), soft_wrap=True)
    for line in (*c.skipped(result["probe_texts"]), c.where_time_went(result["seconds"], result["seconds_by_part"])):
        out.print(f"  {line}", soft_wrap=True)


def _sizes(plan: dict):
    for name, key, unit in (
        ("parameters", "parameters", 1),
        ("MiB of weights", "bytes", 2**20),
        ("KV-cache bytes per token", "kv_bytes_per_token", 1),
    ):
        dense, small = plan[key], plan[f"{key}_after"]
        form = ",.0f" if unit == 1 else ",.1f"
        yield name, f"{dense / unit:{form}}", f"{small / unit:{form}}", f"{small / dense - 1:+.1%}" if dense else ""


def _likelihoods(result: dict):
    held_out = result["held_out"]
    if held_out and "state_error" in held_out:
        found = f"relative error {held_out['state_error']:.3f} on {held_out['windows']} held-out calibration samples"
        yield "cosine of the last states", "1", f"{held_out['cosine']:.4f}", found
    elif held_out:
        yield _likelihood("perplexity", held_out, f"{held_out['windows']} held-out calibration samples")
    for kind, facts in kinds_in(result["probe_texts"]).items():
        yield _likelihood(f"  {kind}", facts, f"{facts['passages']} probe texts{remark_on(facts)}")


def _likelihood(name: str, facts: dict, where: str) -> tuple[str, ...]:
    dense, small = facts["perplexity_dense"], facts["perplexity"]
    return name, f"{dense:.2f}", f"{small:.2f}", f"x {ratio_text(facts)} on {where}"


def show_next(folder: Path, record: dict, out, *, has_stock: bool) -> None:
    """Print the commands that a result is for."""
    place, name = shlex.quote(str(folder)), shlex.quote(folder.name)
    commands = {}
    if "perplexity" in (record["held_out"] or {}):
        commands[f"rankfold evaluate {place} --text wikitext2"] = "perplexity on text it was not fitted to"
        commands[f'rankfold generate {place} "Once upon a time"'] = "let it write"
    if has_stock:
        commands[f"rankfold export {place} -o {shlex.quote(f'{folder}-stock')}"] = "for programs without rankfold"
    commands[f"hf upload {name} {place}"] = "share it on the Hugging Face hub"
    width = max(map(len, commands))
    out.print("next:", *(f"  {line:<{width}}  {what}" for line, what in commands.items()), sep="\n")


def exported_as_stock(folder: Path, record: dict) -> dict | None:
    """Return what a stock export of a result would keep; ``None`` where there is none, or nothing was saved."""
    from ..exports.kept import stock_parameters

    if "before" in record or record["plan"].get("part") not in (None, "language"):
        return None
    exported, dense, now = stock_parameters(folder), record["plan"]["parameters"], record["counts"]["parameters"]
    if exported is None or dense <= now:
        return None
    return {"parameters": exported, "saving_kept": max(0.0, (dense - exported) / (dense - now))}


def show_kept(kept: float, parameters: int, format: str, folder: Path, out) -> None:
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
    line = f"exported with --format {format} it has {parameters:,} parameters: {kept:.0%} of the saving is left"
    record = read_record(folder) if (folder / "rankfold.json").exists() else None
    options = record and options_for_target(record, TARGETS[format])
    if options:
        line += f"; compress with {options} to keep all of it{_cost(record, TARGETS[format])}"
    out.print(line, soft_wrap=True)


def options_for_target(record: dict, target: str) -> str | None:
    """Return the options that choose the ranks of a target; ``None`` where the method of a checkpoint has no such ranks.

    Args:
        record: of the run.
        target: one that leaves heads dense.
    """
    method = record["plan"]["method"]
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in method.items()}
    uniform = {"allocation": "uniform", "exclude_blocks": ()} if target == "stock" else {}
    try:
        make_method(options.pop("method"), **options | {"target": target} | uniform)
    except OptionError:
        return None
    if "before" in record or HEADS & {*(method["modules"] or ())} or method["target"] == target:
        return None
    flags = [*(["--allocation uniform"] if uniform else []), f"--target {target}"]
    return f"`{' '.join(flags)}`" + (" and without --exclude-blocks" if uniform and method["exclude_blocks"] else "")


def _cost(record: dict, target: str) -> str:
    """Name the expected divergence of both models, where ranks were chosen by it."""
    facts = record["plan"]["facts"]
    if target != "stock" or not {"divergence_for_stock", "divergence"} <= facts.keys():
        return ""
    return (
        f", at an expected divergence from the dense model of {facts['divergence_for_stock']:.4f} nats a token in place of "
        f"{sum(facts['divergence'].values()):.4f}"
    )
