"""Several processes that share a compression or an evaluation: how much faster they are than one, and whether they come
to the same bytes.

Runs of one process and of several take turns; ratios are formed within a round. Every process has one thread, so take
no more processes than the machine has cores, and leave it alone meanwhile.

    python benchmarks/processes.py                             # SmolLM2-135M, two processes
"""

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import common
from rankfold._utils.hardware import in_rounds
from rankfold.report.record import read_record

EVALUATE = "evaluate"
DEFINITIONS = {
    "seconds": "by number of processes: of compress(), by the run's own record; of all forwards and losses of "
    "evaluate, without loading the model; median over rounds",
    "ratio": "seconds of one process over those of several within a round; median over rounds, and [min, max]",
    "same": "whether the SHA-256 of all files of weights, or of the perplexity, is the same in all runs",
}


def main() -> None:
    parser = common.arguments(__doc__, "processes")
    common.add_model(parser)
    parser.add_argument("--methods", nargs="+", default=["modegpt", "latentllm", "rankfold", EVALUATE])
    parser.add_argument("--sparsity", type=float, default=0.3)
    common.add_windows(parser)
    parser.add_argument("--text", default="pydoc", help="calibration text; the time does not depend on it")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    tokens = {"source": args.text, "samples": args.samples, "length": args.length, "seed": args.seed}
    config = {"model": {"name": Path(common.model_path(args.model)).name}, "sparsity": args.sparsity, "tokens": tokens}
    config |= {"processes": args.processes, "shards": args.processes, "threads": 1}
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    for method in args.methods:
        if method in record:
            continue
        record.add(method, rounds=args.rounds, **compared(method, args))
        common.say(f"{method}: {record.value['rows'][-1]}")
    common.say(f"wrote {common.shown(str(args.json))}")


def compared(method: str, args) -> dict:
    """Return what the rounds of one method found."""
    sums = set()
    counts = (1, args.processes)
    call = evaluated if method == EVALUATE else partial(compressed, method)
    calls = {count: partial(call, count, args, sums) for count in counts}
    rounds = [*in_rounds(calls, range(args.rounds))]
    ratios = [one[1] / one[args.processes] for one in rounds]
    return {
        "seconds": {str(count): statistics.median(one[count] for one in rounds) for count in counts},
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "same": len(sums) == 1,
        "sha256": sorted(sums),
    }


def compressed(method: str, count: int, args, sums: set[str]) -> float:
    """Compress by the command in ``count`` processes, and add the digest of the weights to ``sums``."""
    place = Path(tempfile.mkdtemp(prefix="rankfold-"))
    options = {
        **{"output": place / "small", "method": method, "sparsity": args.sparsity, "calibration": args.text},
        **{"num-samples": args.samples, "max-length": args.length, "seed": args.seed, "shards": args.processes},
    }
    try:
        run("compress", count, args, options)
        files = sorted((place / "small").glob("*.safetensors"))
        sums.add(hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest())
        return read_record(place / "small")["run"]["seconds"]["total"]
    finally:
        shutil.rmtree(place)


def evaluated(count: int, args, sums: set[str]) -> float:
    """Evaluate by the command in ``count`` processes, and add the digest of the perplexity to ``sums``."""
    options = {"text": args.text, "limit": args.samples, "max-length": args.length, "dtype": "float32"}
    found = json.loads(run("evaluate", count, args, options, "--json").splitlines()[-1])
    sums.add(hashlib.sha256(repr(found["perplexity"]).encode()).hexdigest())
    return found["windows"] * found["length"] / found["tokens_per_second"]


def run(command: str, count: int, args, options: dict, *flags: str) -> str:
    """Run a command in ``count`` processes of one thread each, and return what it prints."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)] if count > 1 else []
    line = [sys.executable, *start, "-m", "rankfold", command, common.model_path(args.model), *flags]
    line += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(line, check=True, env=env, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
