"""The first run of the README, with files in place of what the default calibration set takes from the hub.

A killed run goes on; what is there already is not made again.

    python benchmarks/first_run.py --work first
"""

import subprocess
import sys
from pathlib import Path

import common
from rankfold.data.built_in import DEFAULT_TEXT, MIXTURES
from rankfold.report.record import read_record

SPARSITY = 0.2
FILES = {  # what the default mixture names -> the file that is read for it
    "wikitext2": "text/wikitext2-valid.tokens",
    "c4": "calibration/c4_demo.jsonl",
    "languages": "calibration/languages.jsonl",
}
KEPT = ("base_model", "method", "counts", "held_out", "probe_texts")
DEFINITIONS = {
    "perplexity": "exp of the mean negative log-likelihood per predicted token, in the dense and in the compressed "
    "model, which were read from files, and their ratio with its standard error",
}


def main() -> int:
    parser = common.arguments(__doc__, "first_run")
    common.add_model(parser)
    common.add_data(parser)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder that the model goes to")
    args = parser.parse_args()
    model, output = common.model_path(args.model), (args.work / "small").resolve()
    texts = {name: str(common.data_file(args.data, file)) for name, file in FILES.items()}
    if not output.exists():
        command = [sys.executable, "-m", "rankfold", "compress", model, "-o", str(output), "--sparsity", str(SPARSITY)]
        for name, share in MIXTURES[DEFAULT_TEXT].items():
            command += ["--calibration", f"{texts.get(name, name)}={share}"]
        done = subprocess.run(command)
        if done.returncode:
            return done.returncode
    keep(read_record(output), args.json)
    return 0


def keep(found: dict, path: Path) -> None:
    """Write what a run's record says of the model it made as a record of one row."""
    calibration = found["calibration"]
    config = {
        "model": {"name": found["base_model"]},
        "sparsity": SPARSITY,
        "calibration": {key: calibration[key] for key in ("source", "num_samples", "max_length", "tokens", "sha256")},
    }
    plan = {key: value for key, value in found["plan"].items() if isinstance(value, int)}
    record = common.Record(path, config, DEFINITIONS)
    record.add(found["method"], **{key: found[key] for key in KEPT}, plan=plan)


if __name__ == "__main__":
    sys.exit(main())
