"""One table out of what perplexity_table.py found with several calibration seeds: mean and standard deviation over them."""

import statistics
from collections import defaultdict
from pathlib import Path

import common
import latent_table
from rankfold.files import read_json, write_text

TITLE = "Perplexity over calibration seeds"


def render(paths: list[Path]) -> None:
    """Write ``seeds.md`` of the records that differ in their calibration seed alone."""
    groups = defaultdict(list)
    for record in map(read_json, paths):
        groups[repr(_protocol(record))].append(record)
    groups = [records for records in groups.values() if len(records) > 1]
    if not groups:
        return common.say("seeds: no records that differ in their calibration seed alone")
    lines = [f"# {TITLE}", ""]
    for records in groups:
        lines += [*table(records), ""]
    write_text(common.DOCS / "seeds.md", "\n".join([*lines, "Written by `python benchmarks/render.py`.", ""]))
    common.say(f"wrote seeds.md: {len(groups)} protocols")


def _protocol(record: dict) -> dict:
    """All of a configuration but the windows drawn."""
    config = record["config"]
    calibration = {k: v for k, v in config["calibration"].items() if k not in ("seed", "sha256")}
    return config | {"calibration": calibration}


def table(records: list[dict]) -> list[str]:
    """Settings by sparsity; a cell says the mean, the deviation, and over how many seeds where it is not all of them."""
    found, all_of = defaultdict(list), len(records)
    for record in records:
        for row in record["rows"]:
            found[row.get("setting", "dense"), row["sparsity"]].append(row["perplexity"])
    several = {key: values for key, values in found.items() if len(values) > 1 and key[0] != "dense"}
    sparsities = sorted({sparsity for _, sparsity in several})

    def cell(values: list[float]) -> str:
        few = f" ({len(values)} seeds)" if len(values) < all_of else ""
        return f"{latent_table.number(statistics.mean(values))} ± {statistics.stdev(values):.2f}{few}"

    head = ["", *(f"{s:.0%}" for s in sparsities)]
    rows = [
        [name, *(cell(several[name, s]) if (name, s) in several else "" for s in sparsities)]
        for name in dict.fromkeys(name for name, _ in several)
    ]
    config = records[0]["config"]
    seeds = ", ".join(str(record["config"]["calibration"]["seed"]) for record in records)
    return [
        f"## {config['model']['name']}",
        "",
        "```bash",
        *(command for record in records for command in record["commands"]),
        "```",
        "",
        f"- calibration: {config['calibration']['samples']} x {config['calibration']['length']} tokens of "
        f"`{config['calibration']['source']}`, drawn with the seeds {seeds}",
        f"- evaluation: {config['evaluation']['samples']} x {config['evaluation']['length']} tokens of "
        f"`{config['evaluation']['source']}`",
        "- mean ± standard deviation over the seeds",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
