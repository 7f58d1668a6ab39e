"""Perplexity on texts that were not calibrated on: does an improvement on one text cost another?

SmolLM2-135M, calibrated on the first 200 of 300 C4 documents (32 x 1024 tokens, 4 windows held out, seed 0); evaluated on the
other 100, on WikiText-2 and on TinyStories, 10 windows of 1024 tokens each. A killed run goes on where it was.

    python benchmarks/domains.py
    python benchmarks/domains.py --only rankfold modegpt
    python benchmarks/domains.py --seed 1 --json benchmarks/results/domains_seed1.json
"""

import json
import time

import torch

import common
from perplexity_table import ABLATIONS
from rankfold import CalibrationData, compress, make_method, perplexity
from rankfold.data.text import Text
from rankfold.data.tokens import encode, pack

DOCUMENTS = 200  # of C4 to calibrate on
WINDOWS = 10
SETTINGS = {
    common.MODULE_FORMS_NAME: ("modegpt", common.MODULE_FORMS),
    "modegpt": ("modegpt", {}),
    # A moment shrunk towards a scaled identity by rho is one with a ridge of rho / (1 - rho).
    **{f"modegpt ridge={ridge:g}": ("modegpt", {"ridge": ridge}) for ridge in (1e-3, 1e-2, 1e-1)},
    "rankfold": ("rankfold", {}),
    **{name: ("rankfold", options) for name, options in ABLATIONS.items()},
}
DEFINITIONS = {
    "perplexity": "text -> exp of the mean negative log-likelihood per predicted token, windows of 1024",
    "compress_seconds": "from an open model to the compressed model in memory, calibration included",
}


def main() -> None:
    parser = common.arguments(__doc__, "domains")
    common.add_source(parser)
    common.add_data(parser)
    common.add_windows(parser)
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=("dense", *SETTINGS), help="default: all")
    args = parser.parse_args()
    source = common.open_source(args.model, autocast=args.autocast)
    tokens, texts = read(source, args)
    config = {
        "model": common.describe_model(source),
        "precision": common.precision(source),
        "sparsity": args.sparsity,
        "calibration": common.describe_tokens(tokens.ids, tokens.name, args.seed),
        "evaluation": {name: common.describe_tokens(windows, name) for name, windows in texts.items()},
    }
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    wanted = args.only or ["dense", *SETTINGS]
    if "dense" in wanted and "dense" not in record:
        record.add("dense", perplexity=evaluated(source.whole_model(), texts, source))
    for name, (method, options) in SETTINGS.items():
        if name in wanted and name not in record:
            begin = time.perf_counter()
            model = compress(
                source, method=make_method(method, sparsity=args.sparsity, **options), calibration=tokens
            ).model
            seconds = time.perf_counter() - begin
            record.add(name, perplexity=evaluated(model, texts, source), compress_seconds=seconds)
            common.say(f"{name}: {record.value['rows'][-1]['perplexity']}")
    common.say(f"wrote {common.shown(str(args.json))}")


def read(source, args) -> tuple[CalibrationData, dict[str, torch.Tensor]]:
    """Calibration windows, and evaluation windows by text."""
    c4 = common.data_file(args.data, "calibration/c4_demo.jsonl")
    documents = [json.loads(line)["text"] for line in c4.read_text(encoding="utf-8").splitlines()]
    kept_out = max(1, min(8, args.samples // 8))
    drawn = pack(
        ids_of(source, documents[:DOCUMENTS]), samples=args.samples + kept_out, length=args.length, seed=args.seed
    )
    held_out = drawn[args.samples :].contiguous()
    tokens = CalibrationData(
        drawn[: args.samples].contiguous(), "c4_demo.jsonl", "first 200 documents", args.seed, held_out
    )
    rest = ids_of(source, documents[DOCUMENTS:])
    texts = {"c4_demo.jsonl, rest": rest[: rest.numel() // args.length * args.length].view(-1, args.length)[::4]}
    for name in ("wikitext2-test.tokens", "tinystories_val_sample.txt"):
        path = common.data_file(args.data, f"text/{name}")
        texts[name] = common.windows(source, path, args.length)[:: common.EVERY]
    return tokens, {name: windows[:WINDOWS].contiguous() for name, windows in texts.items()}


def ids_of(source, documents: list[str]) -> torch.Tensor:
    """``(n,)`` token ids of documents joined by blank lines."""
    return encode(Text("c4", tuple(documents), "c4"), source)


def evaluated(model, texts: dict[str, torch.Tensor], source) -> dict[str, float]:
    return {name: perplexity(model, w, autocast=source.autocast)["perplexity"] for name, w in texts.items()}


if __name__ == "__main__":
    main()
