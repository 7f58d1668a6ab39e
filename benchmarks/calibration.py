"""What the choice of calibration text does on other texts.

SmolLM2-135M at sparsity 0.3, calibrated on 32 x 1024 tokens (4 windows held out, seed 0) of the first 200 of 300 C4 documents,
of WikiText-2 validation, of both in equal shares, and of text the model writes itself; evaluated as domains.py does, on the
other 100 C4 documents, WikiText-2 test and TinyStories. A killed run goes on where it was.

    python benchmarks/calibration.py
    python benchmarks/calibration.py --calibration c4 self --only rankfold
"""

import tempfile
import time
from pathlib import Path

import common
import domains
from rankfold import CalibrationData, compress, load_calibration, make_method

CALIBRATIONS = {
    "c4": ("c4",),
    "wikitext2": ("wikitext2",),
    "c4 + wikitext2": ("c4", "wikitext2"),
    "self": ("self",),
}
METHODS = (common.MODULE_FORMS_NAME, "modegpt", "rankfold")  # of domains.SETTINGS
DEFINITIONS = domains.DEFINITIONS | {
    "perplexity": "text -> exp of the mean negative log-likelihood per predicted token, windows as long as in calibration",
    "calibrated on": "c4: the first 200 of 300 documents; wikitext2: validation; +: in equal shares; self: sampled from the "
    "dense model at temperature 1",
}


def main() -> None:
    parser = common.arguments(__doc__, "calibration_smollm2")
    common.add_source(parser)
    common.add_data(parser)
    common.add_windows(parser)
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--calibration", nargs="+", choices=CALIBRATIONS, default=[*CALIBRATIONS], help="default: all")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=domains.SETTINGS, default=METHODS)
    args = parser.parse_args()
    source = common.open_source(args.model, autocast=args.autocast)
    _, texts = domains.read(source, args)
    config = {
        "model": common.describe_model(source),
        "precision": common.precision(source),
        "sparsity": args.sparsity,
        "calibration": {name: getattr(args, name) for name in ("samples", "length", "seed")},
        "evaluation": {name: common.describe_tokens(windows, name) for name, windows in texts.items()},
    }
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    if "dense" not in record:
        record.add("dense", perplexity=domains.evaluated(source.whole_model(), texts, source))
    for calibration in args.calibration:
        wanted = [name for name in args.only if f"{calibration}: {name}" not in record]
        tokens = drawn(calibration, source, args) if wanted else None
        for name in wanted:
            method, options = domains.SETTINGS[name]
            begin = time.perf_counter()
            model = compress(
                source, method=make_method(method, sparsity=args.sparsity, **options), calibration=tokens
            ).model
            facts = {"compress_seconds": time.perf_counter() - begin, "sha256": tokens.sha256}
            facts |= {"perplexity": domains.evaluated(model, texts, source)}
            record.add(f"{calibration}: {name}", calibration=calibration, setting=name, **facts)
            common.say(f"{calibration}: {name}: {facts['perplexity']}")
    common.say(f"wrote {common.shown(str(args.json))}")


def drawn(calibration: str, source, args) -> CalibrationData:
    """Windows of one text or of several in equal shares."""
    documents = common.data_file(args.data, "calibration/c4_demo.jsonl").read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "c4.jsonl"  # without the documents that are evaluated on
        part.write_text("\n".join(documents[: domains.DOCUMENTS]), encoding="utf-8")
        names = {"c4": str(part), "wikitext2": str(common.data_file(args.data, "text/wikitext2-valid.tokens"))}
        texts = [names.get(name, name) for name in CALIBRATIONS[calibration]]
        return load_calibration(texts, source, num_samples=args.samples, max_length=args.length, seed=args.seed)


def table(record: dict) -> list[str]:
    """Perplexity by calibration and method."""
    config, rows = record["config"], record["rows"]
    text, names = config["calibration"], list(config["evaluation"])
    what = f"Sparsity {config['sparsity']}, calibrated on {text['samples']} x {text['length']} tokens."
    body = [
        [row.get("calibration", ""), row.get("setting", "dense"), *(f"{row['perplexity'][name]:.2f}" for name in names)]
        for row in rows
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in (["calibrated on", "", *names], *body)]
    return [what, "", lines[0], "|" + "---|" * (len(names) + 2), *lines[1:]]


if __name__ == "__main__":
    main()
