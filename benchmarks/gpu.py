"""rankfold on one accelerator: rates, equality with the CPU, precision, waits, time and memory by block, speed.

Nothing but this repository, PyTorch, transformers and accelerate is needed: models are made where they run, no text is
loaded. Every command ends within nine minutes: what does not fit any more is left out, and done when the same command
runs again.

    python benchmarks/gpu.py rates precision waits parity   # first: about 7 minutes on an H100
    python benchmarks/gpu.py blocks                         # by stage, for shapes of 7, 13 and 70 billion parameters
    python benchmarks/gpu.py speed                          # dense against compressed
    python benchmarks/gpu.py whole                          # all 32 blocks of 7 billion parameters
    python benchmarks/gpu.py rates parity precision waits blocks whole speed --device cpu --tiny --out /tmp/try
"""

import os
import sys
import tempfile
from pathlib import Path

import common
from accelerator import blocks, parity, precision, rates, speed, waits
from accelerator.bench import Bench
from rankfold.errors import RankfoldError
from rankfold.models.devices import resolve_device

JOBS = {
    "rates": rates.run,
    "parity": parity.run,
    "precision": precision.run,
    "waits": waits.run,
    "blocks": blocks.run,
    "whole": blocks.run_whole,
    "speed": speed.run,
}
DEFINITIONS = rates.DEFINITIONS | parity.DEFINITIONS | precision.DEFINITIONS | waits.DEFINITIONS
DEFINITIONS |= blocks.DEFINITIONS | speed.DEFINITIONS
LIMIT = 500  # seconds after which nothing new is begun; a command may take 540 in all


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("jobs", nargs="+", choices=JOBS)
    parser.add_argument("--device", default="auto", help="an accelerator; cpu: with --tiny, to see that all of it runs")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU does in seconds")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of gpu.json; default: $OUT, or else benchmarks/results"
    )
    parser.add_argument(
        "--shape",
        choices=[name for name in blocks.SHAPES if name != "tiny"],
        help="of blocks and whole alone; default: all, and 7b",
    )
    parser.add_argument("--methods", nargs="+", help="of blocks and whole alone")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of all jobs together")
    args = parser.parse_args()
    try:
        device = resolve_device(args.device)
    except RankfoldError as error:
        sys.exit(str(error))
    out = args.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    if out is None and (device.type == "cpu" or args.tiny):
        sys.exit("a run on a CPU or of tiny sizes is no record of this repository; give --out DIR")
    path = (out or common.RESULTS) / "gpu.json"
    with tempfile.TemporaryDirectory(prefix="rankfold-", ignore_cleanup_errors=True) as folder:
        record = common.Record(path, {"device": device.type, "tiny": args.tiny}, DEFINITIONS, resume=True)
        bench = Bench(device, args.tiny, record, Path(folder), args.limit, args.shape, args.methods)
        for job in args.jobs:
            bench.job = job
            with bench.trying("as a whole"):  # the others still count
                JOBS[job](bench)
    common.say(f"wrote {common.shown(str(path))}")
    if bench.left:
        common.say(f"left out for time, run the same command again: {', '.join(bench.left)}")


if __name__ == "__main__":
    main()
