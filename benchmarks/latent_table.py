"""Table 2 of LatentLLM (arXiv:2505.18413): what pre-conditioner, junction and joint forms each buy.

The moments are measured once on the dense model and kept on disk; every method and sparsity is computed from them. Finished
rows stay when the run is killed (with --moments the moments too). `--render` makes docs/results/latent_table.md out of
all records `latent_*.json` beside --json, and says which of the paper's orders their numbers show.

    python benchmarks/latent_table.py                                      # SmolLM2-135M: calibrated on C4, WikiText-2
    python benchmarks/latent_table.py --model $RANKFOLD_MODELS/opt-6m --text opt-6m-val.txt --samples 128 --length 256 \\
        --json benchmarks/results/latent_opt-6m.json
    python benchmarks/latent_table.py --render
"""

import tempfile
import time
from itertools import pairwise
from pathlib import Path

import common
from rankfold import MomentStore, calibrate, compress, make_method
from rankfold._utils.files import read_json, write_text
from rankfold.errors import NumericsError, OptionError
from rankfold.evaluation.perplexity import DEFINITION

# Name in the table -> method and options. The first six store plain factors, as the paper's ASVD rows do.
METHODS = {
    "identity": ("svd", {}),
    "hessian": ("svd-llm", {"precondition": "hessian"}),
    "l1": ("asvd", {}),
    "l2": ("svd-llm", {"precondition": "l2"}),
    "covariance": ("svd-llm", {"precondition": "covariance"}),
    "rootcov": ("svd-llm", {}),
    "rootcov + block identity": ("rootcov", {}),
    "latentllm (joint)": ("latentllm", {}),
    "rootcov + joint vo": ("latentllm", {"joint": "vo"}),
    "rootcov + joint vo, attention aware": ("latentllm", {"joint": "vo", "attention_aware": True}),
}
# The paper's order, worst first; within a step any of them.
ORDER = (("identity",), ("hessian", "l2"), ("rootcov",), ("rootcov + block identity",), ("latentllm (joint)",))
VO = ("rootcov + joint vo", "rootcov + joint vo, attention aware")
DEFINITIONS = {
    "perplexity": f"{DEFINITION}; with form `plain` (the default) the file is one string instead of rows",
    "nll": "nats per predicted token",
    "sparsity": "asked for: fraction of the linear weights of the blocks",
    "removed": "reached: weights removed over linear weights of the blocks",
    "compress_seconds": "decomposition of all blocks from stored moments",
}
TITLE = "The pre-conditioners, junctions and joint forms of LatentLLM (its Table 2)"


def main() -> None:
    parser = common.arguments(__doc__, "latent_smollm2")
    common.add_protocol(parser)
    parser.add_argument("--text", help="evaluate on all windows of this text in text/; default: WikiText-2")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.4])
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of: dense, {', '.join(METHODS)}")
    parser.add_argument(
        "--moments", type=Path, metavar="DIR", help="keep the moments here; default: a temporary folder"
    )
    parser.add_argument("--render", action="store_true", help="write docs/results/latent_table.md and stop")
    args = parser.parse_args()
    if args.render:
        return render(sorted(args.json.parent.glob("latent_*.json")))

    source = common.open_source(args.model, autocast=args.autocast)
    c4 = common.data_file(args.data, "calibration/c4_demo.jsonl")
    tokens = common.calibration(source, c4, args)
    windows, path = text_windows(source, args) if args.text else common.wikitext2_windows(source, args)
    on = common.evaluation(source, windows, args)
    config = {
        "model": common.describe_model(source),
        "precision": common.precision(source, on),
        "calibration": common.describe_tokens(tokens.ids, c4, args.seed),
        "evaluation": common.describe_tokens(windows, path),
        "mode": "one-pass",
    }
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    if "dense" not in record and (not args.only or "dense" in args.only):
        common.add_perplexity(record, "dense", source.whole_model(), on, sparsity=0.0)
    todo = [
        (f"{name} {sparsity}", name, sparsity)
        for sparsity in args.sparsity
        for name in METHODS
        if f"{name} {sparsity}" not in record and (not args.only or name in args.only)
    ]
    if todo:
        with tempfile.TemporaryDirectory(prefix="rankfold-") as temporary:
            moments = measure(source, tokens, args.moments or Path(temporary) / "moments")
            for row, name, sparsity in todo:
                run(record, row, name, sparsity, source, moments, on)
    common.say(f"wrote {common.shown(str(args.json))}")


def text_windows(source, args):
    path = common.data_file(args.data, f"text/{args.text}")
    return common.windows(source, path, args.length), path


def measure(source, tokens, folder: Path) -> MomentStore:
    view = source.meta_block(0)
    wanted = set().union(*(make_method(name, **options).statistics(view) for name, options in METHODS.values()))
    moments = calibrate(source, tokens, folder, statistics=wanted)
    common.say(f"moments of {len(source)} blocks: {', '.join(sorted(wanted))}")
    return moments


def run(record, row: str, name: str, sparsity: float, source, moments: MomentStore, on) -> None:
    kind, options = METHODS[name]
    method = make_method(kind, sparsity=sparsity, **options)
    facts = {"setting": name, "sparsity": sparsity, "method": method.describe()}
    begin = time.perf_counter()
    try:
        model = compress(source, method=method, moments=moments).model
    except (NumericsError, OptionError) as error:  # a method that cannot do it is a result of this table
        record.add(row, **facts, perplexity=None, nll=None, error=f"not compressed: {error}")
        return common.say(f"{row}: not compressed: {error}")
    facts["compress_seconds"] = time.perf_counter() - begin
    facts["removed"] = model.config.quantization_config.fields["counts"]["sparsity"]
    common.add_perplexity(record, row, model, on, **facts)


def render(paths: list[Path]) -> None:
    """docs/results/latent_table.md out of the records."""
    if not paths:
        common.skip("no latent_*.json to render; run this script without --render first")
    parts = [f"# {TITLE}", "", "Made by", "", "```bash"]
    records = [read_json(path) for path in paths]
    parts += [line for record in records for line in record["commands"]]
    parts += ["python benchmarks/latent_table.py --render", "```", ""]
    parts += ["Perplexity, lower is better. The first six rows store plain factors.", ""]
    for record in records:
        parts += section(record)
    common.DOCS.mkdir(parents=True, exist_ok=True)
    write_text(common.DOCS / "latent_table.md", "\n".join(parts))
    common.say("wrote latent_table.md")


def section(record: dict) -> list[str]:
    config, rows = record["config"], record["rows"]
    value = {(r["setting"], r["sparsity"]): r["perplexity"] for r in rows if "setting" in r}
    sparsities = sorted({s for _, s in value})
    dense = next((r["perplexity"] for r in rows if r["name"] == "dense"), None)
    lines = [f"## {config['model']['name']}", ""]
    for use in ("calibration", "evaluation"):
        text = config[use]
        lines.append(f"- {use}: {text['samples']} x {text['length']} tokens of `{text['source']}`")
    lines += [f"- dense: {number(dense)}", ""] if dense else [""]
    lines += ["| | " + " | ".join(f"{s:.0%}" for s in sparsities) + " |", "|---" * (len(sparsities) + 1) + "|"]
    measured = [name for name in METHODS if any(setting == name for setting, _ in value)]
    for name in measured:
        cells = [number(value[name, s]) if (name, s) in value else "" for s in sparsities]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "The paper's orders, worse first, in these numbers (ratios of perplexities):", ""]
    for worse, better in pairwise(ORDER):
        lines += [verdict(a, b, value, sparsities) for a in worse for b in better]
    if set(VO) <= set(measured):
        lines += [
            "",
            "Values and outputs together, against apart (Remark 11: no gain; `joint=auto` leaves them apart):",
            "",
        ]
        lines += [verdict(name, "rootcov + block identity", value, sparsities) for name in VO]
    return [*lines, ""]


def number(perplexity: float | None) -> str:
    if perplexity is None:
        return "failed"
    if perplexity >= 1e6:
        return f"{perplexity:.1e}"
    return f"{perplexity:.2f}" if perplexity < 1000 else f"{perplexity:,.0f}"


def times(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:,.0f}"


def verdict(worse: str, better: str, value: dict, sparsities: list[float]) -> str:
    """In words, whether one setting is better than another, and by how much."""
    have = [s for s in sparsities if value.get((worse, s)) and value.get((better, s))]
    if not have:
        return f"- {worse} against {better}: not measured."
    ratio = {s: value[worse, s] / value[better, s] for s in have}
    yes, no = [s for s in have if ratio[s] >= 1], [s for s in have if ratio[s] < 1]
    size = "the first over the second: " + ", ".join(f"{times(ratio[s])} at {s:.0%}" for s in have)
    where = ", ".join(f"{s:.0%}" for s in (yes if yes else no))
    if not no:
        return f"- {worse} ≥ {better}: **holds** at every sparsity ({size})."
    if not yes:
        return f"- {worse} ≥ {better}: **does not hold** at any sparsity ({size})."
    return f"- {worse} ≥ {better}: **holds in part**, at {where} ({size})."


if __name__ == "__main__":
    main()
