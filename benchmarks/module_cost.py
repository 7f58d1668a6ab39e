"""What each kind of module holds, what compressing it alone takes, and its error: MoDeGPT's Tables 7, 8 and 24.

Every run is a whole compression of one kind of module in a process of its own, by 30 % of that module's weights: all
its decompositions are timed, and the most memory that one of them took beyond what was resident before it is kept. The
last run of a method compresses all of them. Its effect on perplexity (Tables 7 and 29) is the study `alone` of
studies_opt-6m.yaml.

    python benchmarks/module_cost.py
    python benchmarks/module_cost.py --model $RANKFOLD_MODELS/opt-6m --text opt-6m-val.txt --length 256 \\
        --json benchmarks/results/module_cost_opt-6m.json
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

import common
from experiment import of_name
from memory import reset_peak, resident
from rankfold import compress, make_method
from rankfold.methods import Method
from rankfold.report.record import peak_memory_bytes, read_record
from texts import TextFiles, described

SPARSITY = 0.3
METHODS = ("rankfold", "modegpt", "modegpt, the paper's module forms, our ridge", "latentllm")
PARTS = {
    "mlp": ("gate", "up", "down"),
    "qk": ("q", "k"),
    "vo": ("v", "o"),
}  # matrices of a module, as latentllm names them
ALL = "all"
DEFINITIONS = {
    "share": "weights of these modules over the linear weights of the blocks; removed: what of these went",
    "decompose_seconds": "of all decompositions, weights and moments in memory; without measuring, forwards, writing",
    "decompose_peak_bytes": "largest over the blocks: resident set within a decomposition minus that before it",
    "compress_seconds": "of the whole run, from an open model to the checkpoint: calibration, ranks, decompositions, "
    "held-out windows, writing",
    "compress_peak_bytes": "largest resident set of the run minus that of the open model",
    "model_bytes": "of the weights of the dense model in the precision they are computed in",
    "relative_error": "mean over blocks, and over the matrices of a module where each has its own, "
    "on calibration windows",
    "held_out_error": "the same on windows that were not fitted",
}


def main() -> None:
    parser = common.arguments(__doc__, "module_cost_smollm2")
    common.add_model(parser)
    common.add_precision(parser)
    common.add_data(parser)
    common.add_windows(parser)
    parser.add_argument(
        "--text", help="one text in the data's text/ folder, half for each; default: WikiText-2 validation"
    )
    parser.add_argument("--only", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD")
    parser.add_argument("--worker", nargs=2, metavar=("METHOD", "MODULE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    source = common.open_source(args.model, args.precision)
    tokens, text = calibration(source, args)
    if args.worker:
        print(json.dumps(worker(source, tokens, *args.worker)))
        return
    config = {
        "model": common.describe_model(source),
        "precision": common.precision(source),
        "calibration": common.describe_tokens(tokens.ids, text, tokens.seed),
        "sparsity": SPARSITY,
    }
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    del source
    for method in args.only:
        for module in (*PARTS, ALL):
            name = f"{method}: {module}"
            if name not in record:
                own = [sys.executable, __file__, *sys.argv[1:], "--worker", method, module]
                done = subprocess.run(own, stdout=subprocess.PIPE, text=True, check=True)
                record.add(name, setting=method, module=module, **json.loads(done.stdout))
                common.say(f"{name}: {record.value['rows'][-1]['decompose_seconds']:.1f} s of decompositions")
    common.say(f"wrote {common.shown(str(args.json))}")


def calibration(source, args):
    """Calibration windows, and what text they are of."""
    files = TextFiles(args.data, Path(), {})
    how = {"text": "text/wikitext2-valid.tokens", "samples": args.samples, "length": args.length, "seed": args.seed}
    how |= {"text": f"text/{args.text}", "half": "first"} if args.text else {}
    return files.calibration(source, how), described(how["text"], how)


def worker(source, tokens, name: str, module: str) -> dict:
    """Compress one kind of module, in this process alone, and say what it took."""
    kind, options = of_name(name)
    watch = Watch()
    method = watched(make_method(kind, **options, **own_sparsity(source, kind, module)), watch)
    before = resident()
    with tempfile.TemporaryDirectory(prefix="rankfold-") as folder:
        begin = time.perf_counter()
        small = compress(
            source, method=method, calibration=tokens, output=Path(folder) / "small", on_plan=watch.start
        ).output
        seconds = time.perf_counter() - begin
        record = read_record(small)
    watch.note_peak()
    item = source.compute_dtype.itemsize
    return {
        **sizes(record, watch.plan.modules),
        "decompose_seconds": watch.seconds,
        "decompose_peak_bytes": watch.largest,
        "compress_seconds": seconds,
        "compress_peak_bytes": watch.peak - before,
        "model_bytes": sum(p.numel() for p in source.model.parameters()) * item,
        **({} if module == ALL else errors(record)),
        "method": method.describe(),
    }


def own_sparsity(source, kind: str, module: str) -> dict:
    """Options that compress one kind of module only."""
    if module == ALL:
        return {"sparsity": SPARSITY}
    parts = PARTS[module] if kind == "latentllm" else (module,)
    there = make_method(kind).supported_modules(source.architecture, source.meta_block(0))
    return {"modules": {part: SPARSITY for part in parts if part in there}}


class Watch:
    """What the decompositions of a run take, counted from its plan on: without those that the ranks are chosen by."""

    def __init__(self):
        self.plan, self.seconds, self.largest, self.peak = None, 0.0, 0, 0

    def start(self, plan) -> None:
        self.plan = plan

    def note_peak(self) -> None:
        """Keep the largest resident set of the process before it is forgotten."""
        self.peak = max(self.peak, peak_memory_bytes())

    def of(self, decompose):
        """A decomposition that is measured; not so the held-out moments, which some ask for on the way."""

        def run(view, moments, held_out):
            outside = []

            def measured():
                begin = time.perf_counter()
                found = held_out()
                outside.append(time.perf_counter() - begin)
                return found

            self.note_peak()
            reset_peak()
            before, begin = resident(), time.perf_counter()
            result = decompose(view, moments, measured)
            if self.plan is not None:
                self.seconds += time.perf_counter() - begin - sum(outside)
                self.largest = max(self.largest, peak_memory_bytes() - before)
            return result

        return run


def watched(method: Method, watch: Watch) -> Method:
    """The same method, its decompositions watched."""

    class Watched(type(method)):
        def stages(self, view, ranks):
            return [stage._replace(decompose=watch.of(stage.decompose)) for stage in super().stages(view, ranks)]

    return Watched(**{option.name: getattr(method, option.name) for option in fields(method)})


def sizes(record: dict, modules) -> dict:
    """Share of the blocks' weights, and what went of it."""
    weights, dense = (sum(getattr(m, name) for m in modules) for name in ("weights", "dense_weights"))
    return {
        "share": dense / record["counts"]["counted_weights"],
        "removed": 1 - weights / dense,
    }


def errors(record: dict) -> dict:
    """Means over blocks and over what reports an error in them; errors of different modules are not on one scale."""
    reports = [report for block in record["blocks"].values() for report in block.values()]
    found = {}
    for key in ("relative_error", "held_out_error"):
        values = [report[key] for report in reports if report.get(key) is not None]
        found[key] = statistics.mean(values) if values else None
    return found


if __name__ == "__main__":
    main()
