"""Perplexity against measured tokens per second, as in MoDeGPT's Fig. 3, by `rankfold.comparison`.

SmolLM2-135M, calibrated as for the grid of all methods; perplexity on WikiText-2 test. Prefill and decode of 8 sequences run in
turns with the dense model; the picture shows the ratio within a round. The paper's methods, without SLEB, which removes whole
blocks like ShortGPT and is as fast. A killed run goes on with the next row.

    python benchmarks/tradeoff.py
    python benchmarks/tradeoff.py --only rankfold shortgpt --sparsity 0.2 0.4
"""

from pathlib import Path

import common
import grid
import latent_table
import studies_table
from rankfold.comparison import Form, Speed
from rankfold.evaluation.speed import DEFINITION

FORMS = [
    Form("rankfold"),
    Form("modegpt"),
    Form("modegpt", common.MODULE_FORMS),
    Form("latentllm"),
    Form("slicegpt"),
    Form("shortgpt"),
]
KINDS = ("prefill", "decode")
NAMES = {FORMS[2].label: "modegpt, paper's module forms"}  # in the picture and the table
DEFINITIONS = grid.DEFINITIONS | {"speed": DEFINITION} | {name: f"`{label}`" for label, name in NAMES.items()}


def main() -> None:
    args = grid.arguments(__doc__, "tradeoff_smollm2", FORMS, texts=grid.TEXTS[:1]).parse_args()
    grid.run(args, FORMS, DEFINITIONS, speed=lambda source: Speed(source.context_length))


def table(record: dict) -> list[str]:
    """The pictures, written beside the page, and their numbers."""
    from rankfold.comparison.report.page import pictures  # the extra rankfold[report]
    from rankfold.comparison.report.plots import drawn

    rows = [row for row in record["rows"] if "error" not in row]
    rows.sort(key=lambda row: row["setting"] != "dense")
    dense, *others = rows
    lines = [*studies_table.texts(record), f"- {facts(record)}", ""]
    lines += ["A point of a curve is a sparsity; from the smallest on, as in the table.", ""]
    for picture in pictures([as_compared(row) for row in rows]):
        if picture.name.startswith("speed-"):
            path = common.DOCS / f"{Path(record['config']['model']['name']).stem}-{picture.name}.png"
            path.write_bytes(drawn(picture).png)
            lines += [f"![{picture.title}]({path.name})", ""]
    speeds = " and ".join(f"{dense['speed'][f'{kind}_tokens_per_second']:,.0f} in {kind}" for kind in KINDS)
    perplexity = ", ".join(latent_table.number(value) for value in dense["perplexity"].values())
    lines += [
        f"Perplexity; speed over the dense model's in prefill, in decode. Dense: {perplexity}; {speeds}, tokens/s.",
        "",
    ]
    return [*lines, *studies_table.table({(name_of(r), f"{r['sparsity']:.0%}"): cell(r) for r in others}), ""]


def name_of(row: dict) -> str:
    return NAMES.get(row["setting"], row["setting"])


def facts(record: dict) -> str:
    """How speed was measured."""
    options = record["config"]["speed"]
    return f"speed: {options['batch']} x {options['prompt']} tokens, then {options['steps']} steps; {options['repeats']} rounds"


def cell(row: dict) -> str:
    ratios = ", ".join(f"{row['speed'][f'{kind}_ratio']:.2f}" for kind in KINDS)
    return f"{', '.join(map(latent_table.number, row['perplexity'].values()))}; {ratios}"


def as_compared(row: dict) -> dict:
    """A row as the report of a comparison takes it."""
    texts = [{"text": Path(text).stem, "perplexity": value} for text, value in row["perplexity"].items()]
    return {
        "label": name_of(row),
        "status": "done",
        "sparsity": row["sparsity"],
        "counts": {"sparsity": row["removed"]},
        "modules": [],
        "measures": {"texts": texts, "speed": row["speed"]},
    }


if __name__ == "__main__":
    main()
