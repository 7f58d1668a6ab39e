"""One table out of what perplexity_table.py or domains.py found with several calibration seeds: mean and standard deviation."""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import common
import latent_table
from rankfold._utils.files import read_json, write_text

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


def _cells(record: dict) -> Iterator[tuple[str, str, float]]:
    """Setting, column and perplexity: columns are sparsities, or the texts of domains.py."""
    for row in record["rows"]:
        if isinstance(row["perplexity"], dict):
            at = record["config"]["sparsity"]
            yield from ((row["name"], f"{text}, {at:.0%}", value) for text, value in row["perplexity"].items())
        elif row["sparsity"]:
            yield row["setting"], f"{row['sparsity']:.0%}", row["perplexity"]


def table(records: list[dict]) -> list[str]:
    """Settings by column; a cell says the mean, the deviation, and over how many seeds where it is not all of them."""
    found = defaultdict(list)
    for record in records:
        for setting, column, value in _cells(record):
            found[setting, column].append(value)
    several = {key: values for key, values in found.items() if len(values) > 1 and key[0] != "dense"}
    texts = isinstance(records[0]["config"].get("sparsity"), float)
    columns = list(dict.fromkeys(column for _, column in several))
    columns = columns if texts else sorted(columns, key=lambda column: float(column[:-1]))

    def cell(values: list[float]) -> str:
        few = f" ({len(values)} seeds)" if len(values) < len(records) else ""
        return f"{latent_table.number(statistics.mean(values))} ± {statistics.stdev(values):.2f}{few}"

    rows = [
        [name, *(cell(several[name, column]) if (name, column) in several else "" for column in columns)]
        for name in dict.fromkeys(name for name, _ in several)
    ]
    config = records[0]["config"]
    seeds = ", ".join(str(record["config"]["calibration"]["seed"]) for record in records)
    head = ["", *columns]
    return [
        f"## {config['model']['name']}",
        "",
        "```bash",
        *(command for record in records for command in record["commands"]),
        "```",
        "",
        f"- calibration: {config['calibration']['samples']} x {config['calibration']['length']} tokens of "
        f"`{config['calibration']['source']}`, drawn with the seeds {seeds}",
        *([] if texts else [_evaluation(config)]),
        "- mean ± standard deviation over the seeds",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _evaluation(config: dict) -> str:
    on = config["evaluation"]
    return f"- evaluation: {on['samples']} x {on['length']} tokens of `{on['source']}`"
