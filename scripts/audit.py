"""Recompute every number of the README from the committed records, by the standard library alone.

python scripts/audit.py             # a line for each number, PASS or FAIL; exit code 1 where one fails
python scripts/audit.py other.md    # of another text with the same tables

Perplexities are recomputed from the mean negative log-likelihood, means of tasks from their accuracies, percentages and
ratios from the two numbers that they compare.
"""

import json
import math
import re
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COLUMNS = {"dense": "dense", "rankfold": "rankfold 0.3", "modegpt": "modegpt 0.3", "latentllm": "latentllm (joint) 0.3"}
RECORDS = {  # how the name of a model begins in the README -> record
    "SmolLM2": "perplexity_smollm2",
    "Qwen2.5": "perplexity_qwen2.5",
    "Gemma 3": "perplexity_gemma3",
}
NONE = "–"
C4 = "c4_demo.jsonl"
SIZES = {  # lines of the example -> key in the record, unit, form
    "parameters": ("parameters", 1, ",.0f"),
    "MiB of weights": ("bytes", 2**20, ",.1f"),
    "KV-cache bytes per token": ("kv_bytes_per_token", 1, ",.0f"),
}


class Finding(NamedTuple):
    """A number as it is stated, and as the records have it; the latter is empty where nothing vouches for it."""

    what: str
    stated: str
    found: str

    @property
    def passes(self) -> bool:
        return self.stated == self.found


def record(name: str) -> dict:
    """Return a committed record, its rows by name."""
    found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found | {"rows": {row["name"]: row for row in found["rows"]}}


def table(text: str) -> Iterator[Finding]:
    """Yield every number of the first table."""
    lines = [line.strip("| ").split(" | ") for line in text.split("\n") if line.startswith("| ")]
    names = [name.strip("`") for name in lines[0][1:]]
    for what, *cells in lines[1:]:
        for name, stated in zip(names, cells, strict=True):
            yield Finding(f"{what}, {name}", stated, cell(what, COLUMNS.get(name, name)))
        if found := re.search(r"(\d+) x (\d+) tokens", what):
            config = record(of_model(what))["config"]["evaluation"]
            config = config.get(C4, config)
            yield Finding(f"{what}, excerpt", found[0], f"{config['samples']} x {config['length']} tokens")


def of_model(what: str) -> str:
    """Return the record that a row of the table is of."""
    if "of C4" in what:
        return "grid_smollm2"
    return next(name for model, name in RECORDS.items() if what.startswith(f"perplexity of {model}"))


def cell(what: str, name: str) -> str:
    """Return what a cell has to say; nothing where no record vouches for its row."""
    if what.startswith("parameters"):
        return millions(record("perplexity_smollm2")["rows"][name]["parameters"])
    if "of C4" in what:
        return rounded(record(of_model(what))["rows"][name.replace(" (joint)", "")]["perplexity"][C4])
    if what.startswith("perplexity of "):
        row = record(of_model(what))["rows"].get(name)
        return NONE if row is None else rounded(math.exp(row["nll"]))
    if what.startswith("zero-shot accuracy of SmolLM2-135M"):
        tasks = record("zero_shot_smollm2")["rows"][name]["tasks"]
        return f"{100 * fmean(task['acc'] for task in tasks.values()):.1f} %" if len(tasks) == 4 else ""
    return ""


def millions(count: int) -> str:
    return f"{count / 1e6:.1f} M"


def rounded(value: float) -> str:
    return f"{value:.1f}" if value < 200 else f"{value:.0f}"


def example(text: str) -> Iterator[Finding]:
    """Yield every line of the example of a table in a terminal."""
    block = re.search(r"```text\n(small: .*?)```", text, re.S)
    if block is None:
        return
    (run,) = record("first_run")["rows"].values()
    counts = run["counts"]
    removed = f"{counts['removed_weights'] / counts['counted_weights']:.2%} of the {counts['counted_weights']:,}"
    head, _, *lines = block[1].splitlines()
    yield Finding("example, weights", head.partition(", ")[2], f"{removed} counted weights removed")
    for line in lines:
        name, *cells = re.split(" {2,}", line.strip())
        yield Finding(f"example, {name}", "  ".join(cells), outcome(name, run))


def outcome(name: str, run: dict) -> str:
    """Return what a line of the example has to say; nothing where the record has no such line."""
    if name in SIZES:
        key, unit, form = SIZES[name]
        before, after = run["plan"][key], run["plan"][f"{key}_after"]
        return f"{before / unit:{form}}  {after / unit:{form}}  {after / before - 1:+.1%}"
    facts = run["held_out"] if name == "perplexity" else run["probe_texts"]["kinds"].get(name)
    if facts is None:
        return ""
    dense, small = facts["perplexity_dense"], facts["perplexity"]
    error = small / dense * facts["standard_error"]
    if name == "perplexity":
        texts = f"{facts['windows']} held-out calibration samples"
    else:
        texts = f"{facts['passages']} probe texts" + (": DAMAGED" if facts["is_damaged"] else "")
    return f"{dense:.2f}  {small:.2f}  x {small / dense:.2f} ± {error:.2f} on {texts}"


def speeds(text: str) -> Iterator[Finding]:
    """Yield the speed of prefill and of decoding."""
    if stated := re.search(r"is × ([\d.]+) as fast", text):
        found = record("speed")["rows"]["prefill 8x256 float32"]["models"]["compressed"]["ratio"]
        yield Finding("speed, prefill 8x256", stated[1], f"{found:.2f}")
    pattern = r"× ([\d.]+) \(one sequence\) or × ([\d.]+) \(eight\) in fp32, × ([\d.]+) or × ([\d.]+) in bf16"
    if stated := re.search(pattern, text):
        kinds = product(("float32", "bfloat16"), (1, 8))
        for (dtype, batch), value in zip(kinds, stated.groups(), strict=True):
            found = record("decode")["rows"][f"SmolLM2-135M, {dtype}, batch {batch}"]["found"]["compressed"]["ratio"]
            yield Finding(f"speed, decoding of {batch} in {dtype}", value, f"{found:.2f}")


def costs(text: str) -> Iterator[Finding]:
    """Yield what a run costs, and the tokens of its calibration set."""
    if stated := re.search(r"costs about (\d+) forward passes over its calibration set: ([\d,]+) tokens", text):
        ratio = record("compression_cost_pydoc")["rows"]["float32"]["ratios"]["default"]["ratio"]
        yield Finding("cost, forward passes", stated[1], f"{ratio:.0f}")
        yield Finding("cost, tokens", stated[2], f"{record('first_run')['config']['calibration']['tokens']:,}")


def answers(text: str) -> Iterator[Finding]:
    """Yield what is kept of exact answers at each sparsity."""
    if stated := re.search(r"keeps (\d+), (\d+) and (\d+) % of its exact answers at 0.1, 0.2 and 0.3", text):
        rows = record("gates_smollm2")["rows"]
        for sparsity, value in zip((0.1, 0.2, 0.3), stated.groups(), strict=True):
            kept = rows[f"rankfold {sparsity}"]["kept"]["exact"]
            yield Finding(f"exact answers at {sparsity}", value, f"{100 * kept:.0f}")


def counts(text: str) -> Iterator[Finding]:
    """Yield counts of families and methods, and the versions that are needed."""
    if found := re.search(r"(\d+) model families", text):
        page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
        listed = {line.split("|")[1].strip() for line in page.split("\n") if re.match(r"\| (?!---|model )", line)}
        yield Finding("model families", found[1], str(len(listed)))
    if "over twenty to compare with" in text:
        page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
        methods = len(re.findall(r"^### [a-z]", page, re.M)) - 3
        yield Finding("methods to compare with", "over twenty", "over twenty" if 20 < methods < 30 else str(methods))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {"Python": project["requires-python"], **dict(map(requirement, project["dependencies"]))}
    for name, version in re.findall(r"\b(Python|PyTorch|transformers) (\d+(?:\.\d+)+)", text):
        bound = re.search(r">=([\d.]+)", needed[{"PyTorch": "torch"}.get(name, name)])
        yield Finding(f"least version of {name}", version, bound[1] if bound else "")


def requirement(text: str) -> tuple[str, str]:
    """Split the name of a package from its versions."""
    name = re.match(r"[\w.-]+", text)[0]
    return name, text[len(name) :]


def audit(text: str) -> list[Finding]:
    """Return all findings on a text like the README."""
    sentences = " ".join(text.split())  # wherever their lines break
    found = (speeds(sentences), costs(sentences), answers(sentences), counts(sentences))
    return [*table(text), *example(text), *chain.from_iterable(found)]


def main(path: Path) -> int:
    findings = audit(path.read_text(encoding="utf-8"))
    for finding in findings:
        verdict = "PASS" if finding.passes else "FAIL"
        print(
            f"{verdict}  {finding.what}: {finding.stated}"
            + ("" if finding.passes else f", got {finding.found or 'nothing'}")
        )
    failed = [finding for finding in findings if not finding.passes]
    print(
        f"{'FAIL' if failed else 'PASS'}: {len(findings) - len(failed)} of {len(findings)} numbers come out of the "
        "records"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "README.md"))
