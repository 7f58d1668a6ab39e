"""Why `spd_inverse` appends a few rows: Cholesky of matrices whose rows are a whole number of memory pages is slower.

python benchmarks/cholesky.py
"""

import statistics

import torch

import common
from rankfold._utils.hardware import seconds_of
from rankfold.linalg.psd import CACHE_LINE

WIDTHS = (1024, 1536, 2816, 4096)  # of MLPs; 512 fp64 numbers are a page
DEFINITIONS = {
    "seconds": "Cholesky of an (N, N) fp64 matrix; median over rounds",
    "padded_seconds": f"the same with N + {CACHE_LINE}",
    "ratio": "seconds over padded_seconds of the same round; median over rounds",
}


def main() -> None:
    parser = common.arguments(__doc__, "cholesky")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    record = common.Record(args.json, {"widths": WIDTHS, "repeats": args.repeats}, DEFINITIONS)
    for N in WIDTHS:
        rounds = [(seconds(N), seconds(N + CACHE_LINE)) for _ in range(args.repeats + 1)][1:]  # the first warms up
        plain, padded = (statistics.median(times) for times in zip(*rounds, strict=True))
        ratio = statistics.median(a / b for a, b in rounds)
        record.add(str(N), seconds=plain, padded_seconds=padded, ratio=ratio)
        common.say(f"{N}: {plain * 1e3:.1f} ms, padded {padded * 1e3:.1f} ms, x {ratio:.2f}")
    common.say(f"wrote {common.shown(str(args.json))}")


def seconds(N: int) -> float:
    A = torch.full((N, N), 0.5 / N, dtype=torch.float64).diagonal_scatter(torch.ones(N, dtype=torch.float64))
    return seconds_of(lambda: torch.linalg.cholesky_ex(A), A.device)


if __name__ == "__main__":
    main()
