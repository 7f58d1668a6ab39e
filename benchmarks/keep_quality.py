"""`--keep-quality`: what was asked for, the sparsity found, and what is kept of text that is no calibration text.

A killed run goes on.

    python benchmarks/keep_quality.py --model $RANKFOLD_MODELS/opt-6m --text text/opt-6m-val.txt --first 64
"""

from pathlib import Path

import common
import rankfold
from rankfold.evaluation.perplexity import perplexity

CALIBRATION = "text/wikitext2-valid.tokens"
KEPT_OF = ("held-out samples", "other text")
DEFINITIONS = {
    **dict.fromkeys(
        KEPT_OF,
        "the dense model's perplexity over the compressed model's: the fraction of a token's likelihood that is kept",
    ),
    "predicted": "that fraction of held-out samples, before the run that was kept",
    "compressions": "that the search took, each a whole one; the costs of modules are measured once for all",
}


def main() -> None:
    parser = common.arguments(__doc__)
    common.add_model(parser)
    common.add_precision(parser)
    common.add_data(parser)
    common.add_windows(parser)
    parser.set_defaults(length=512)
    parser.add_argument("--qualities", type=float, nargs="+", default=[0.95, 0.9, 0.8, 0.7])
    parser.add_argument("--methods", nargs="+", default=["rankfold", "modegpt"])
    parser.add_argument("--text", default="text/wikitext2-test.tokens", help="that is evaluated on")
    parser.add_argument("--first", type=int, default=16, help="windows of it")
    parser.add_argument("--json", type=Path, metavar="OUT", help="record to write")
    args = parser.parse_args()
    source = common.open_source(args.model, args.precision)
    tokens = common.calibration(args, source, CALIBRATION)
    ids = common.windows(source, common.data_file(args.data, args.text), tokens.ids.shape[1])[: args.first]
    config = {
        "model": common.describe_model(source),
        "calibration": common.describe_tokens(tokens.ids, Path(CALIBRATION).name, tokens.seed),
        "held_out": len(tokens.held_out),
        "evaluation": common.describe_tokens(ids, Path(args.text).name),
        "precision": common.precision(source),
        "kept_of": KEPT_OF,
    }
    path = args.json or common.RESULTS / f"keep_quality_{Path(args.model).stem}.json"
    record = common.Record(path, config, DEFINITIONS, resume=True)
    dense = perplexity(source.whole_model(), ids, autocast=source.autocast)["perplexity"]
    for method in args.methods:
        for asked in args.qualities:
            name = f"{method} {asked:g}"
            if name not in record:
                record.add(name, method=method, asked=asked, **found(source, method, asked, tokens, ids, dense))
                common.say(f"{name}: {record.value['rows'][-1]}")


def found(source, method: str, asked: float, tokens, ids, dense: float) -> dict:
    """Return what the search found, and what the model keeps of another text; or why there is none."""
    try:
        result = rankfold.compress(source, method=method, keep_quality=asked, calibration=tokens)
    except rankfold.RankfoldError as error:
        return {"error": str(error)}
    goal = result.record["goal"]
    other = perplexity(result.model, ids, autocast=source.autocast)["perplexity"]
    runs = [*goal["earlier_runs"], *goal["later_runs"]]
    return {
        "sparsity": result.plan.sparsity,
        "predicted": goal["predicted"],
        "kept": dict(zip(KEPT_OF, (goal["got"], dense / other), strict=True)),
        "compressions": 1 + len(runs),
        "runs": runs,
    }


if __name__ == "__main__":
    main()
