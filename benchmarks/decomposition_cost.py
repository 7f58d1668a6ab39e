"""What decomposing one block of a 7B model costs: seconds and peak memory of every module, each in its own process.

Random weights and moments of the shape of Llama-2-7B (d = 4096, F = 11008, 32 heads); `--scale 4` divides all of it. No
matrix larger than the moment of the MLP's hidden units is needed; one d x d matrix per head would be 32 x 128 MiB.

    python benchmarks/decomposition_cost.py
    python benchmarks/decomposition_cost.py --scale 4
"""

import argparse
import json
import subprocess
import sys
import time

import torch
import transformers

import common
from memory import reset_peak, resident
from rankfold import DenseModel, make_method
from rankfold.architectures import BlockView
from rankfold.calibration.moments import Moment
from rankfold.compression.budget import rank_options
from rankfold.compression.plan import allocate_ranks
from rankfold.report.record import peak_memory_bytes

WIDTH, HIDDEN, HEAD_DIM = 4096, 11008, 128
# Method -> groups of modules that are decomposed together.
GROUPS = {
    "modegpt": (("mlp",), ("qk",), ("vo",)),
    "latentllm": (("q", "k"), ("v",), ("o",), ("gate",), ("up",), ("down",)),
}
ROWS = 4096  # samples where a method iterates on activations
DEFINITIONS = {
    "seconds": "of decompose() of this module of one block, weights and moments in memory",
    "peak_bytes": "largest resident set of the process in it, minus what was resident before: weights and moments",
    "resident_bytes": "weights of the block, moments of this module, and the program itself",
    "relative_error": "of the random problem; shows only that the decomposition was done",
}


def main() -> None:
    parser = common.arguments(__doc__, "decomposition_cost")
    parser.add_argument("--scale", type=int, default=1, help="divide width, hidden units and heads by this")
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--methods", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--modules", nargs="+", metavar="MODULE", help="only groups with these; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", nargs=2, metavar=("METHOD", "GROUP"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(worker(args, args.worker[0], tuple(args.worker[1].split(",")))))
        return
    shape = {"width": WIDTH // args.scale, "hidden": HIDDEN // args.scale, "heads": WIDTH // args.scale // HEAD_DIM}
    config = {**shape, "head_dim": HEAD_DIM, "sparsity": args.sparsity, "seed": args.seed, "scale": args.scale}
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    for method in args.methods:
        for group in GROUPS[method]:
            name = f"{method} {'+'.join(group)}"
            if name in record or (args.modules and not set(group) & set(args.modules)):
                continue
            own = [sys.executable, __file__, *sys.argv[1:], "--worker", method, ",".join(group)]
            done = subprocess.run(own, stdout=subprocess.PIPE, text=True)
            if done.returncode:  # out of memory kills the process; the others still count
                record.add(name, method=method, modules=group, error=f"exit code {done.returncode}")
                common.say(f"{name}: failed, exit code {done.returncode}")
                continue
            facts = json.loads(done.stdout)
            record.add(name, method=method, modules=group, **facts)
            common.say(f"{name}: {facts['seconds']:.1f} s, {facts['peak_bytes'] / 2**30:.2f} GiB")
    common.say(f"wrote {common.shown(str(args.json))}")


@torch.no_grad()
def worker(args: argparse.Namespace, name: str, group: tuple[str, ...]) -> dict:
    """Decompose one group of modules, in this process alone."""
    method = make_method(name, sparsity=args.sparsity)
    source = one_block(args.scale)
    ranks = {m: r for (_, m), r in allocate_ranks(rank_options(source, method), method).ranks.items() if m in group}
    torch.manual_seed(args.seed)
    for parameter in source.blocks[0].parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    view = BlockView(source.architecture, 0, source.blocks[0], source.config, source.inv_freq(0))
    wanted = make_method(name, sparsity=args.sparsity, modules=group).statistics(view)
    moments = {statistic: random_moment(statistic, view) for statistic in sorted(wanted)}
    reset_peak()
    before, begin = resident(), time.perf_counter()
    result = method.decompose(view, moments, ranks)
    seconds, peak = time.perf_counter() - begin, peak_memory_bytes()
    reports = {m: result.reports[m] for m in group}
    return {
        "ranks": ranks,
        "seconds": seconds,
        "resident_bytes": before,
        "peak_bytes": max(0, peak - before),
        "relative_error": {m: r["relative_error"] for m, r in reports.items()},
        "form": {m: r.get("form") for m, r in reports.items()},
    }


def one_block(scale: int) -> DenseModel:
    """A Llama of one block."""
    heads = WIDTH // scale // HEAD_DIM
    config = common.llama(WIDTH // scale, HIDDEN // scale, heads, heads, blocks=1, vocabulary=64)
    return DenseModel(transformers.LlamaForCausalLM(config), "random", torch.device("cpu"), torch.float32, None)


def random_moment(statistic: str, view: BlockView) -> Moment:
    """A moment with a spectrum that falls off as those of trained models do, times a random diagonal."""
    attention, width = view.attention, view.config.hidden_size
    if statistic == "absolute":
        return Moment(1.0, None, torch.rand(width), None)
    if statistic == "mlp_samples":
        return Moment(ROWS, None, None, None, torch.randn(ROWS, width))
    heads = {
        "query": attention.heads,
        "key": attention.kv_heads,
        "value": attention.kv_heads,
        "query_key": attention.heads,
    }
    size = {"mlp_hidden": view.mlp.hidden}.get(statistic, attention.head_dim if statistic in heads else width)
    lead = (heads[statistic],) if statistic in heads else ()
    rank = min(size, 256)
    factor = torch.randn(*lead, size, rank) * torch.arange(1, rank + 1).float() ** -0.5
    second = factor @ factor.mT
    second.diagonal(dim1=-2, dim2=-1).add_(torch.rand(*lead, size) * 0.05)
    return Moment(1.0, torch.randn(*lead, size) * 0.01, torch.rand(*lead, size), second)


if __name__ == "__main__":
    main()
