"""A model at hand by the rules of LowRankArena: `rankfold compare --protocol lowrankarena`, whose rows are the record.

Its texts come from the hub; here are parts of them, and what differs from the rules is on the page. The folder of the
comparison stays: the same command continues, and further methods and sparsities are added.

    python benchmarks/lowrankarena.py --work arena
    python benchmarks/lowrankarena.py --work arena --methods rankfold --sparsities 0.2
    python benchmarks/lowrankarena.py --work arena --model $RANKFOLD_MODELS/opt-6m --limit 8  # minutes
"""

import json
import subprocess
import sys
from pathlib import Path

import common
from rankfold.comparison.folder import CONFIG, read_config
from rankfold.comparison.protocol import read_protocol

PROTOCOL = read_protocol("lowrankarena")
CALIBRATION, SAMPLES = "text/wikitext2-valid.tokens", 112  # as many as it has, but those held out
TEXTS = {"WikiText-2": "text/wiki.test.raw", "C4": "calibration/c4_demo.jsonl"}
TASKS = "tasks"
KEPT = ("label", "status", "error", "sparsity", "mode", "counts", "measures", "protocol", "compress_seconds")
DEFINITIONS = {
    "kept": "share of all parameters",
    "Q. Ret.": "mean over both perplexities, the mean of the multiple-choice tasks and the mathematics of MMLU of what "
    "is kept of the dense model's value",
    "perplexity": "exp of the mean negative log-likelihood per predicted token, windows of 2,048 tokens",
    "accuracy": "of all questions at hand: HellaSwag's first 2,000; of ARC, OpenBookQA, BoolQ, PIQA and WinoGrande the "
    "validation split; `acc_norm` where lm-eval has it",
}


def main() -> int:
    parser = common.arguments(__doc__)
    common.add_model(parser)
    common.add_data(parser)
    parser.add_argument("--methods", default=PROTOCOL.methods)
    parser.add_argument("--sparsities", default=",".join(map(str, PROTOCOL.sparsities)), help="of the whole model")
    parser.add_argument("--limit", help="only the first windows and questions, a try")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folders of the comparisons")
    parser.add_argument("--json", type=Path, metavar="OUT", help="record to write")
    args = parser.parse_args()
    model = common.model_path(args.model)
    args.work.mkdir(parents=True, exist_ok=True)
    texts = [str(common.data_file(args.data, file)) for file in TEXTS.values()]
    data = Path(texts[0]).parents[1]
    options = {
        "--protocol": PROTOCOL.name,
        "--methods": args.methods,
        "--sparsities": args.sparsities,
        "--calibration": f"wikitext2:{common.data_file(args.data, CALIBRATION)}",
        "--num-samples": str(SAMPLES),
        "--include-path": str(data / TASKS),
        "--output": str(args.work / Path(model).stem),
    }
    command = [sys.executable, "-m", "rankfold", "compare", model, "--json"]
    command += [word for pair in options.items() for word in pair]
    command += ["--text", f"wikitext2:{texts[0]}", "--text", texts[1], *(["--limit", args.limit] if args.limit else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):  # 1: a row could not be done, and says why
        return done.returncode
    keep(json.loads(done.stdout), args)
    return done.returncode


def keep(found: dict, args) -> None:
    """Write the rows of a comparison as a record."""
    path = args.json or common.RESULTS / f"lowrankarena_{Path(args.model).stem}.json"
    identity = read_config(Path(found["output"]) / CONFIG)["identity"]
    model = {"name": identity["base_model"], "fingerprint": identity["fingerprint"]}
    config = {"model": model, "texts": list(TEXTS), "protocol": identity["protocol"]}
    record = common.Record(path, config, DEFINITIONS)
    for row in found["rows"]:
        record.add(f"{row['label']} {row['sparsity']:g}", **{key: row[key] for key in KEPT if key in row})


if __name__ == "__main__":
    sys.exit(main())
