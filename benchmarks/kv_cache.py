"""The key/value cache at sparsity 0.3, and what it costs to have it counted in the budget.

Texts, windows and precision as in perplexity_table.py. A budget in parameters leaves the cache to chance: ranks go by what
they cost, and queries, keys and values are dear. `--budget bytes:batch=N` counts the cache of N sequences beside the weights.

    python benchmarks/kv_cache.py
    python benchmarks/kv_cache.py --only "rankfold, the cache counted 0.3"
    python benchmarks/kv_cache.py --model $RANKFOLD_MODELS/opt-6m --text opt-6m-val.txt --length 256 \\
        --json benchmarks/results/kv_cache_opt-6m.json
"""

import common
import perplexity_table
from latent_table import number
from rankfold import compress, make_method
from rankfold.evaluation.complexity import cache_bytes

BATCH, CONTEXT = 4, 2048  # sequences, and tokens of each
ITEM = 2  # bytes of a number in bf16
COUNTED = {"budget": f"bytes:batch={BATCH},context={CONTEXT}"}
NAME = "rankfold, the cache counted"
SETTINGS = {  # method, options, sparsities
    "rankfold": ("rankfold", {}, (0.3, 0.5)),
    "modegpt": ("modegpt", {}, (0.3,)),
    "latentllm": ("latentllm", {}, (0.3,)),
    NAME: ("rankfold", COUNTED, (0.2, 0.3)),
}
DEFINITIONS = {
    "perplexity": perplexity_table.DEFINITIONS["perplexity"],
    "nll": perplexity_table.DEFINITIONS["nll"],
    "sparsity": "asked for: fraction of the linear weights of the blocks; where the cache is counted, of the bytes of the "
    f"blocks and of the cache of {BATCH} sequences of {CONTEXT} tokens",
    "parameters": perplexity_table.DEFINITIONS["parameters"],
    "kv_bytes_per_token": "by which the cache grows with a token, in bf16: a cache is filled and counted; the plan agrees",
    "weight_bytes": "of the blocks, in bf16",
    "cache_bytes": f"of {BATCH} sequences of {CONTEXT} tokens, or as many as the model's context has, in bf16",
}


def main() -> None:
    parser = common.arguments(__doc__, "kv_cache_smollm2")
    common.add_protocol(parser)
    parser.add_argument("--text", help="one text in the data's text/ folder, half for each; default: WikiText-2")
    names = [f"{setting} {sparsity}" for setting, (*_, sparsities) in SETTINGS.items() for sparsity in sparsities]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=["dense", *names], default=["dense", *names])
    args = parser.parse_args()
    source = common.open_source(args.model, autocast=args.autocast)
    split = perplexity_table.halves if args.text else perplexity_table.wikitext2
    tokens, windows, texts = split(source, args)
    cached = BATCH * min(CONTEXT, source.context_length)
    on = common.evaluation(source, windows, args)
    record = common.Record(args.json, common.protocol(source, on, tokens, texts), DEFINITIONS, resume=True)
    if "dense" in args.only and "dense" not in record:
        model = source.whole_model()
        add(record, "dense", model, on, (blocks_of(source), cached), setting="dense", sparsity=0.0)
    for setting, (name, options, sparsities) in SETTINGS.items():
        for sparsity in sparsities:
            row = f"{setting} {sparsity}"
            if row in args.only and row not in record:
                method, plans = make_method(name, sparsity=sparsity, **options), []
                model = compress(source, method=method, calibration=tokens, on_plan=plans.append).model
                kept = blocks_of(source) - (plans[0].parameters - plans[0].parameters_after)
                facts = {"method": method.describe(), "budget": plans[0].budget}
                assert plans[0].kv_bytes_per_token_after == cache_bytes(model), "the plan is wrong about the cache"
                add(record, row, model, on, (kept, cached), setting=setting, sparsity=sparsity, **facts)
    common.say(f"wrote {common.shown(str(args.json))}")


def blocks_of(source) -> int:
    """Parameters of the dense blocks."""
    return sum(p.numel() for p in source.blocks.parameters())


def add(record, name: str, model, on, counts: tuple[int, int], **facts) -> None:
    """Evaluate and keep the row; ``counts`` are the parameters of the blocks and the tokens in the cache."""
    per_token = cache_bytes(model) // model.dtype.itemsize * ITEM
    sizes = {"weight_bytes": counts[0] * ITEM, "cache_bytes": per_token * counts[1]}
    perplexity_table.add(record, name, model, on, kv_bytes_per_token=per_token, **sizes, **facts)


def table(record: dict) -> list[str]:
    """Every row with its cache, for `render.py`."""
    dense = next(row for row in record["rows"] if row["setting"] == "dense")
    rows = sorted(
        record["rows"], key=lambda row: (row is not dense, [*SETTINGS].index(row["setting"]) if row is not dense else 0)
    )
    head = ["", "sparsity", "perplexity", "KV-cache bytes per token", "MB of the blocks"]
    head += [f"MB of a cache of {dense['cache_bytes'] // dense['kv_bytes_per_token']:,} tokens", "MB together"]
    body = []
    for row in rows:
        together = row["weight_bytes"] + row["cache_bytes"]
        cells = [row["setting"], f"{row['sparsity']:.0%}", number(row["perplexity"])]
        cells += [_beside(row["kv_bytes_per_token"], dense["kv_bytes_per_token"], f"{row['kv_bytes_per_token']:,}")]
        cells += [f"{row[name] / 1e6:.1f}" for name in ("weight_bytes", "cache_bytes")]
        body.append([*cells, _beside(together, dense["weight_bytes"] + dense["cache_bytes"], f"{together / 1e6:.1f}")])
    texts = record["config"]
    what = [
        f"- {use}: {texts[use]['samples']} x {texts[use]['length']} tokens of `{texts[use]['source']}`"
        for use in ("calibration", "evaluation")
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(cells)} |" for cells in body)]
    return [*what, "", *lines]


def _beside(value: int, dense: int, shown: str) -> str:
    return shown if value == dense else f"{shown} ({value / dense - 1:+.1%})".replace("-", "−")


if __name__ == "__main__":
    main()
