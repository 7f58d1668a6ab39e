"""What compressing costs, in forwards: the time of a whole compression over the time of one plain forward.

All times are of ONE run on one machine, in rounds that take the measurements in turning order; ratios are formed within
a round. `forward`: embedding and all blocks over the calibration tokens, nothing measured. `one-pass` and `sequential`:
`rankfold.compress` into a folder, from an open model to the finished checkpoint on disk. `default`: the method and the
allocation that are taken when nothing is said; then come the default without each of its steps, or with one that is
off.

    python benchmarks/compression_cost.py                      # SmolLM2-135M, 32 x 1024 tokens
    python benchmarks/compression_cost.py --method latentllm --json benchmarks/results/compression_cost_latentllm.json
    python benchmarks/compression_cost.py --samples 128 --length 2048 --precisions float32 --kinds one-pass default \
        --repeats 1 --json benchmarks/results/compression_cost_pydoc.json   # all of pydoc: 49 x 2048 tokens
"""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import common
from experiment import of_name
from rankfold import CalibrationData, Rankfold, compress, make_method
from rankfold._utils.hardware import in_rounds
from rankfold.calibration.runner import advance, start
from rankfold.data.load import load_calibration

TARGETS = {"one-pass": 2.0, "sequential": 3.5, "default": 7.0}
STEPS = ("allocation=uniform", "residual_correction=false", "output_weighting=fisher", "allow_module_removal=true")
DEFAULTS = {"default": {}} | {f"rankfold {step}": of_name(f"rankfold {step}")[1] for step in STEPS}
KINDS = ("one-pass", "sequential", *DEFAULTS)
DEFINITIONS = {
    "forward_seconds": "embedding and all blocks over the calibration tokens, block by block; median over rounds",
    "one-pass_seconds": "compress(mode='one-pass') of an open model into a folder, all included; median over rounds",
    "sequential_seconds": "compress(mode='sequential') of an open model into a folder, all included; "
    "median over rounds",
    "default_seconds": "compress() by method rankfold with its measured allocation into a folder; median over rounds",
    "rankfold ..._seconds": "the same with these options",
    "default_over_one_pass": "seconds over those of one-pass in the same round; median over rounds",
    "ratio": "seconds over forward seconds of the same round and precision; median over rounds, and [min, max]",
}


def main() -> None:
    parser = common.arguments(__doc__, "compression_cost")
    common.add_model(parser)
    parser.add_argument("--method", default="modegpt")
    parser.add_argument("--sparsity", type=float, default=0.3)
    common.add_windows(parser)
    parser.add_argument("--text", default="pydoc", help="calibration text; the time does not depend on it")
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help="by default all")
    parser.add_argument("--precisions", nargs="+", choices=("autocast", "float32"), default=["autocast", "float32"])
    args = parser.parse_args()

    source = common.open_source(args.model)
    method = make_method(args.method, sparsity=args.sparsity)
    tokens = load_calibration(args.text, source, num_samples=args.samples, max_length=args.length, seed=args.seed)
    config = {
        "model": common.describe_model(source),
        "method": method.describe(),
        "tokens": common.describe_tokens(tokens.ids, args.text, args.seed),
        "repeats": args.repeats,
        "streamed": source.streamed,
        "targets": TARGETS,
    }
    record = common.Record(args.json, config, DEFINITIONS)
    native = source.autocast
    for name in args.precisions:
        if name == "autocast" and native is None:
            common.say("autocast is off on this processor: it has no bf16 instructions")
            continue
        source.autocast = native if name == "autocast" else None
        rounds = measure(source, method, tokens, args.kinds, args.repeats)
        record.add(name, precision=common.precision(source), **summary(rounds), rounds=rounds)
        common.say(f"{name}: {record.value['rows'][-1]['ratios']}")
    common.say(f"wrote {common.shown(str(args.json))}")


def measure(source, method, tokens: CalibrationData, kinds: list[str], repeats: int) -> list[dict[str, float]]:
    """Seconds of a forward and of all kinds in every round; one short forward before makes kernels and pages warm."""
    forward(source, CalibrationData(tokens.ids[:1], tokens.name, tokens.origin, tokens.seed))

    def one(kind: str) -> float:
        fresh = common.again(source)
        if kind == "forward":
            seconds = forward(fresh, tokens)
        elif kind in DEFAULTS:
            seconds = whole(fresh, Rankfold(sparsity=method.sparsity, **DEFAULTS[kind]), tokens, "sequential")
        else:
            seconds = whole(fresh, method, tokens, kind)
        common.say(f"{kind}: {seconds:.1f} s")
        return seconds

    return [*in_rounds({kind: partial(one, kind) for kind in ("forward", *kinds)}, range(repeats))]


def forward(source, tokens: CalibrationData) -> float:
    begin = time.perf_counter()
    stream = start(source, tokens.ids, autocast=source.autocast)
    for index in range(len(source)):
        advance(source.block(index), stream)
    return time.perf_counter() - begin


def whole(source, method, tokens: CalibrationData, mode: str) -> float:
    with tempfile.TemporaryDirectory(prefix="rankfold-") as folder:
        begin = time.perf_counter()
        compress(source, method=method, calibration=tokens, output=Path(folder) / "small", mode=mode)
        return time.perf_counter() - begin


def summary(rounds: list[dict[str, float]]) -> dict:
    facts = {f"{kind}_seconds": statistics.median(r[kind] for r in rounds) for kind in rounds[0]}
    ratios = {}
    for kind in [kind for kind in KINDS if kind in rounds[0]]:
        values = [r[kind] / r["forward"] for r in rounds]
        middle = statistics.median(values)
        ratios[kind] = {"ratio": middle, "range": [min(values), max(values)], "target": TARGETS.get(kind)}
        if kind in TARGETS:
            ratios[kind]["met"] = middle <= TARGETS[kind]
    if {"default", "one-pass"} <= rounds[0].keys():
        facts["default_over_one_pass"] = statistics.median(r["default"] / r["one-pass"] for r in rounds)
    return facts | {"ratios": ratios}


if __name__ == "__main__":
    main()
