"""What every method must keep of the dense model (gates.toml), measured; names what falls short, with exit code 1.

python benchmarks/gates.py                          # all models at hand; a killed run goes on where it was
python benchmarks/gates.py --only opt-6m            # one model
"""

import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

import rankfold
from common import HERE, RESULTS, Record, arguments, data_file, describe_model, model_path, say
from rankfold.cli.forms import parse_forms
from rankfold.comparison import Accuracies, Generations, Measures, Perplexities, cells_of, compare
from rankfold.evaluation.tasks import Questions
from rankfold.evaluation.text import Texts
from rankfold.evaluation.writing import DEFINITIONS as WRITTEN
from rankfold.evaluation.writing import Writing

GATES = HERE / "gates.toml"
SETTINGS = ("file", "dtype", "calibration", "text", "tasks", "prompts")  # of a model; all else are methods
DEFINITIONS = {
    "perplexity": "perplexity of the dense model over the compressed one's",
    "tasks": "mean accuracy over the dense model's",
    "exact": "mean share of exact answers by greedy generation over the dense model's; none where that has none",
    "equal": "share of the dense model's tokens in free text",
}

WRITING = {
    "last word, copying, arithmetic": WRITTEN["exact"],
    "repetition": WRITTEN["repetition"],
    "distinct": WRITTEN["distinct"],
    "tokens": WRITTEN["first_difference"],
}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", metavar="MODEL", help="a model of the file")
    parser.add_argument("--gates", type=Path, default=GATES, metavar="TOML", help="what must be kept")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where records go")
    parser.add_argument(
        "--data", default=os.environ.get("RANKFOLD_DATA"), metavar="DIR", help="texts and rows of tasks"
    )
    args = parser.parse_args()
    gates = tomllib.loads(args.gates.read_text(encoding="utf-8"))
    if args.only and args.only not in gates:
        sys.exit(f"{args.gates.name} has no model {args.only!r}; it has {', '.join(gates)}")
    short = []
    for name in [args.only] if args.only else gates:
        path = place_of(name, gates[name]["file"])
        if path is None:
            say(f"{name}: left out, it is not at hand; set RANKFOLD_MODELS to the folder it is in")
            continue
        found = run(name, path, gates[name], args.data, args.results)
        short += [line for row in found for line in falls_short(row)]
    for line in short:
        print(f"SHORT  {line}")
    print(f"{len(short)} gates fall short" if short else "every gate is met")
    return 1 if short else 0


def place_of(name: str, file: str) -> str | None:
    """Return where a model lies; ``None`` where it is not at hand."""
    path = Path(os.environ.get("RANKFOLD_MODELS", ".")) / file
    if path.exists():
        return str(path)
    try:
        return model_path(name) if name == "smollm2" else None
    except SystemExit:
        return None


def run(name: str, path: str, gate: dict, data: str | None, results: Path) -> list[dict]:
    """Measure a model and what every method makes of it; return the rows of its record."""
    source = rankfold.open_model(path, dtype=gate["dtype"], device="cpu")
    calibration, text, tasks = gate["calibration"], gate["text"], gate.get("tasks")
    folder = f"{data}/tasks" if data else None
    work = Path(tempfile.gettempdir()) / f"rankfold-gates-{name}-{source.fingerprint[:8]}"
    halves = work.with_suffix(".texts")
    texts = Texts([place_of_text(data, text["name"], text, halves)], text["length"], text["windows"])
    functions = {
        "texts": Perplexities(source, texts),
        "generation": Generations(source, Writing(folder, gate["prompts"])),
    }
    if tasks:
        functions["tasks"] = Accuracies(source, Questions(tasks["names"], folder, tasks["questions"]))
    measures = Measures(functions, lambda: rankfold.load(path, dtype=gate["dtype"], device="cpu"))
    tokens = rankfold.load_calibration(
        place_of_text(data, calibration["text"], calibration, halves),
        source,
        num_samples=calibration["num_samples"],
        max_length=calibration["max_length"],
    )
    methods = {method: limits for method, limits in gate.items() if method not in SETTINGS}
    cells = [cell for method, limits in methods.items() for cell in cells_of(parse_forms(method), map(float, limits))]
    found = compare(
        source, cells, tokens, measures, work, on_row=lambda row: say(f"{name}: {row['label']} at {row['sparsity']}")
    )
    config = {"model": describe_model(source), **{key: gate[key] for key in SETTINGS if key in gate}}
    dense = found[0]["measures"]
    record = Record(results / f"gates_{name}.json", config, DEFINITIONS | WRITING)
    record.value["written by the dense model"] = written(dense)
    for row in found[1:]:
        least = methods[row["label"]][f"{row['sparsity']:g}"]
        kept = {"error": row["error"]}
        if not row["error"]:
            kept = {"kept": kept_of(row["measures"], dense), "written": written(row["measures"])}
        label = f"{row['label']} {row['sparsity']:g}"
        record.add(label, setting=row["label"], sparsity=row["sparsity"], least=least, **kept)
    shutil.rmtree(work)
    shutil.rmtree(halves, ignore_errors=True)
    return record.value["rows"]


def place_of_text(data: str | None, name: str, how: dict, folder: Path) -> str:
    """Return the file of a text, or of the half of its lines that is asked for, written now: no line is in both."""
    path = data_file(data, name)
    if "half" not in how:
        return str(path)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    middle = len(lines) // 2
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{path.stem}, {how['half']} half{path.suffix}"
    place.write_text("".join({"first": lines[:middle], "second": lines[middle:]}[how["half"]]), encoding="utf-8")
    return str(place)


def kept_of(own: dict, dense: dict) -> dict[str, float]:
    """Return what is kept of the dense model's quality, by name of the gate."""
    found = {"perplexity": dense["texts"][0]["perplexity"] / own["texts"][0]["perplexity"]}
    if "tasks" in own:
        found["tasks"] = mean(own["tasks"], "acc") / mean(dense["tasks"], "acc")
    before = mean(dense["generation"]["exact"], "share")
    if before:
        found["exact"] = mean(own["generation"]["exact"], "share") / before
    return found | {"equal": own["generation"]["equal"]}


def written(measures: dict) -> dict[str, float | None]:
    """Return what a model writes, by name of a column."""
    facts = measures["generation"]
    exact = {kind: found["share"] for kind, found in facts["exact"].items()}
    return exact | {
        "repetition": facts["repetition"],
        "distinct": facts["distinct"],
        "tokens": facts.get("first_difference"),
    }


def mean(facts: dict[str, dict], key: str) -> float:
    values = [one[key] for one in facts.values()]
    return sum(values) / len(values)


def falls_short(row: dict) -> list[str]:
    """Return a line for every gate that a row does not meet."""
    if "error" in row:
        return [f"{row['name']}: could not be done ({row['error']})"]
    return [
        f"{row['name']}: {gate} keeps {row['kept'][gate]:.3f} of the dense model, {least} is wanted"
        for gate, least in row["least"].items()
        if row["kept"].get(gate, 0.0) < least
    ]


if __name__ == "__main__":
    sys.exit(main())
