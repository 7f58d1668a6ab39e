"""One table out of perplexity_table.py and domains.py: the default without each of its steps, on one text and across texts."""

from pathlib import Path

import common
from latent_table import number
from rankfold._utils.files import read_json, write_text

TITLE = "The default without each of its steps"
DEFAULT = "rankfold"


def render(results: Path) -> None:
    """Write ``ablations.md`` of the models that have both records."""
    across = {record["config"]["model"]["fingerprint"]: record for record in _of_one_seed(results, "domains*.json")}
    found = _of_one_seed(results, "perplexity_*.json")
    both = [(record, across.get(record["config"]["model"]["fingerprint"])) for record in found]
    lines = [f"# {TITLE}", ""]
    for record, other in both:
        if other is not None:
            lines += [*table(record, other), ""]
    write_text(common.DOCS / "ablations.md", "\n".join([*lines, "Written by `python benchmarks/render.py`.", ""]))
    common.say("wrote ablations.md")


def _of_one_seed(results: Path, pattern: str) -> list[dict]:
    return [read_json(path) for path in sorted(results.glob(pattern)) if "_seed" not in path.name]


def table(record: dict, across: dict) -> list[str]:
    """Settings by sparsity on one text, then by text at the sparsity of the other record."""
    found = {(row["setting"], row["sparsity"]): row for row in record["rows"] if "setting" in row}
    texts = {row["name"]: row["perplexity"] for row in across["rows"]}
    at, names = across["config"]["sparsity"], list(across["config"]["evaluation"])
    settings = [name for name in dict.fromkeys(name for name, _ in found) if name.partition(" ")[0] == DEFAULT]
    settings = sorted(settings, key=lambda name: (name != DEFAULT, -perplexity_of(found, name, at)))
    sparsities = sorted({s for name, s in found if name in settings and name != DEFAULT})

    def row(name: str) -> list[str]:
        return [
            name,
            *(number(found[name, s]["perplexity"]) if (name, s) in found else "" for s in sparsities),
            *(number(texts[name][text]) if name in texts else "" for text in names),
        ]

    shown = [name for name in (*settings, common.MODULE_FORMS_NAME) if any(key[0] == name for key in found)]
    one, other = (config["calibration"]["source"] for config in (record["config"], across["config"]))
    head = ["", *(f"{one}, {s:.0%}" for s in sparsities), *(f"{other} → {text}, {at:.0%}" for text in names)]
    return [
        f"## {record['config']['model']['name']}",
        "",
        "```bash",
        *record["commands"],
        *across["commands"],
        "```",
        "",
        f"Perplexity; calibrated on {one} or on {other}.",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(row(name))} |" for name in shown),
    ]


def perplexity_of(found: dict, name: str, sparsity: float) -> float:
    return found[name, sparsity]["perplexity"] if (name, sparsity) in found else 0.0
