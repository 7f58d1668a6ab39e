"""Tokens per second of several compressed models beside the dense one, prefill and decode, in enough rounds.

``modules``: one kind of module compressed alone, by a share of its own weights (MoDeGPT's Table 30).
``junctions``: LatentLLM in three junctions.

Every round runs all models once, in turning order, and a ratio is formed within a round. Rounds end when the middle
half of the ratios of every model lies on one side of 1, or at the most there may be; then a ratio is no difference.
Speed depends on shapes, not on values, so the models are calibrated on little text. Run it on a quiet machine.

    python benchmarks/module_speed.py modules --sparsity 0.2 0.3 0.4 0.5 --dtypes float32 bfloat16
    python benchmarks/module_speed.py junctions --batch 1
"""

import tempfile
from functools import partial
from pathlib import Path

import common
from pages.costs import settled
from rankfold import load, make_method
from rankfold._utils.hardware import in_rounds
from rankfold.evaluation.speed import prompts, run
from speed import make

KINDS = ("prefill", "decode")
MODULES = {"mlp": ("mlp",), "qk": ("qk",), "vo": ("vo",), "all": ("mlp", "qk", "vo")}
JUNCTIONS = {"block identity (default)": "block_identity_right", "symmetric": "symmetric", "lu": "lu"}
SPARSITY = {
    "modules": "share of its own weights that a module loses, in every block",
    "junctions": "fraction of the linear weights of the blocks",
}
DEFINITIONS = {
    "prefill, decode": "prefill: B x T prompt tokens over the time of one forward that fills the cache and computes "
    "the last logits; decode: B x S tokens over the time of S greedy steps with that cache; medians over rounds, one "
    "round before them is not counted",
    "ratio": "compressed over dense within a round; median over rounds, in brackets its quartiles",
    "no difference measured": "the quartiles of the ratio lie on both sides of 1 after the most rounds there may be",
}


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("what", choices=SPARSITY)
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="record; default: results/module_speed_smollm2.json or junction_…"
    )
    common.add_model(parser)
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.3])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    for name, default in {"batch": 4, "prompt": 128, "steps": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--least", type=int, default=7, help="rounds, whatever they show; at least 4, for quartiles")
    parser.add_argument("--most", type=int, default=40, help="rounds, where the quartiles do not settle")
    args = parser.parse_args()
    if not 4 <= args.least <= args.most or (args.what == "junctions" and len(args.sparsity) > 1):
        parser.error("--least is at least 4 and at most --most; junctions are measured at one sparsity")
    source, path = common.open_source(args.model), args.json or common.RESULTS / f"{args.what[:-1]}_speed_smollm2.json"
    record = common.Record(path, config(args, source), {"sparsity": SPARSITY[args.what]} | DEFINITIONS, resume=True)
    for sparsity in args.sparsity:
        measure(record, source, sparsity, args)
    common.say(f"wrote {common.shown(str(path))}")


def config(args, source) -> dict:
    rounds = {"least": args.least, "most": args.most}
    if args.what == "junctions":
        facts = {"method": "latentllm", "sparsity": args.sparsity[0], "speed": rounds}
    else:
        facts = {"method": "modegpt", "speed": shapes(args) | rounds}
    return {"model": common.describe_model(source)} | facts


def shapes(args) -> dict:
    return {name: getattr(args, name) for name in ("batch", "prompt", "steps")}


def methods(what: str, sparsity: float) -> dict:
    """Return name of a row -> method."""
    if what == "modules":
        return {name: make_method("modegpt", modules=dict.fromkeys(some, sparsity)) for name, some in MODULES.items()}
    return {name: make_method("latentllm", sparsity=sparsity, junction=one) for name, one in JUNCTIONS.items()}


def measure(record: common.Record, source, sparsity: float, args) -> None:
    """Add the rows of one sparsity."""
    at, facts = f"{args.batch} x {args.prompt} + {args.steps}", shapes(args)
    if args.what == "modules":
        at, facts = sparsity, {"sparsity": sparsity}
    wanted = [dtype for dtype in args.dtypes if f"{dtype} {at}" not in record]
    with tempfile.TemporaryDirectory(prefix="rankfold-") as folder:
        chosen = methods(args.what, sparsity).items() if wanted else ()
        small = {name: make(source, method, Path(folder, str(n))) for n, (name, method) in enumerate(chosen)}
        for dtype in wanted:
            models = {"dense": load(common.model_path(args.model), dtype=dtype)}
            models |= {name: load(path, dtype=dtype) for name, path in small.items()}
            found = measured(models, **shapes(args), least=args.least, most=args.most)
            record.add(f"{dtype} {at}", dtype=dtype, **facts, **found)
            for kind in KINDS:
                common.say(f"{kind}: " + ", ".join(f"{name} {settled(found['models'][name][kind])}" for name in small))


def measured(models: dict, *, batch: int, prompt: int, steps: int, least: int, most: int) -> dict:
    """Return ``{"rounds", "models": {name: {kind: summary}}}``; the others are compared with the first model."""
    ids = prompts(models, batch, prompt)
    speeds = {kind: {name: [] for name in models} for kind in KINDS}
    calls = {name: partial(run, model, ids, steps) for name, model in models.items()}
    for turn, seconds in enumerate(in_rounds(calls, range(most + 1))):
        for name, taken in seconds.items() if turn else ():  # the first round warms up caches and kernels
            for kind, tokens, one in zip(KINDS, (batch * prompt, batch * steps), taken, strict=True):
                speeds[kind][name].append(tokens / one)
        if turn >= least and all(map(apart, (one for mine in speeds.values() for one in common.speeds(mine).values()))):
            break
    common.say(f"{turn} rounds")
    found = {kind: common.speeds(mine) for kind, mine in speeds.items()}
    return {"rounds": turn, "models": {name: {kind: found[kind][name] for kind in KINDS} for name in models}}


def apart(found: dict) -> bool:
    """Return whether the middle half of the ratios is on one side of 1; there are none of the first model."""
    low, high = found.get("quartiles", (0, 0))
    return low > 1 or high < 1


if __name__ == "__main__":
    main()
