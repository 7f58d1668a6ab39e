"""Every method at every sparsity on the same texts, by `rankfold.comparison`: one calibration for all that take moments.

SmolLM2-135M, 32 x 1024 tokens of WikiText-2 validation; methods that can be computed on moments of the dense model are, the
others are calibrated one block after another. 2:4 sparsity is 50 % and nothing else. A killed run goes on with the next row,
given `--work` within one; rows that failed are tried again.

    python benchmarks/grid.py
    python benchmarks/grid.py --only rankfold modegpt slicegpt --sparsity 0.2
"""

import argparse
import sys
import tempfile
from pathlib import Path

import common
from rankfold.checkpoint.load import load_model
from rankfold.comparison import Cell, Form, Measures, Perplexities, cells_of, compare
from rankfold.errors import RankfoldError
from rankfold.evaluation.text import Texts
from rankfold.methods import TwoOfFour, method_class, method_names
from rankfold.report.identity import dtype_name

SPARSITIES = (0.1, 0.2, 0.3, 0.4, 0.5)
TEXTS = ("text/wikitext2-test.tokens", "calibration/c4_demo.jsonl")
FORMS = [Form(name) for name in method_names()] + [Form("modegpt", common.MODULE_FORMS)]
DEFINITIONS = {
    "perplexity": "exp of the mean negative log-likelihood per predicted token, by text; the first windows of each, in the "
    "precision the model is opened in, without autocast",
    "sparsity": "asked for: fraction of the linear weights of the blocks",
    "removed": "reached: weights removed over linear weights of the blocks; of 2:4 sparsity the zeros, which stay stored",
    "parameters": "of the compressed model, biases included, a tied matrix once",
    "compress_seconds": "from an open model to the checkpoint; what shares moments does not count their calibration",
    "damaged": "the run itself warned: perplexity on held-out calibration windows rose more than (1 - sparsity)^-3",
}


def main() -> None:
    args = arguments(__doc__, "grid_smollm2", FORMS).parse_args()
    run(args, FORMS, DEFINITIONS)


def arguments(doc: str, name: str, forms: list[Form], texts=TEXTS) -> argparse.ArgumentParser:
    """Options of a comparison of these forms."""
    parser = common.arguments(doc, name)
    common.add_source(parser)
    common.add_data(parser)
    common.add_windows(parser)
    parser.add_argument("--calibrate", default="text/wikitext2-valid.tokens", metavar="FILE", help="in the data")
    parser.add_argument("--text", nargs="+", default=texts, metavar="FILE", help="in the data, to evaluate on")
    parser.add_argument("--first", type=int, default=16, metavar="N", help="windows of each text")
    parser.add_argument("--only", nargs="+", metavar="LABEL", choices=[form.label for form in forms])
    parser.add_argument("--sparsity", type=float, nargs="+", default=SPARSITIES)
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder of the comparison; default: a temporary one")
    return parser


def run(args: argparse.Namespace, forms: list[Form], definitions: dict[str, str], **more) -> None:
    """Do what the record lacks; what failed is tried again, as by `rankfold compare`.

    Args:
        more: name of a further measure -> function of the source that makes it.
    """
    source = common.open_source(args.model, autocast=args.autocast)
    tokens = common.calibration(source, common.data_file(args.data, args.calibrate), args)
    texts = Texts([str(common.data_file(args.data, text)) for text in args.text], args.length, args.first)
    functions = {"texts": Perplexities(source, texts)} | {name: make(source) for name, make in more.items()}
    measures = Measures(functions, lambda: _dense(args.model, source))
    described = measures.describe()
    config = {
        "model": common.describe_model(source),
        "precision": common.precision(source),
        "calibration": common.describe_tokens(tokens.ids, common.data_file(args.data, args.calibrate), tokens.seed),
        "evaluation": [
            {key: text[key] for key in ("text", "windows", "length", "sha256")} for text in described.pop("texts")
        ],
        **described,
    }
    record = common.Record(args.json, config, definitions, resume=True)
    done = {row["name"] for row in record.value["rows"] if "error" not in row}
    wanted = [
        cell
        for cell in cells(forms, args.only, args.sparsity)
        if _name({"label": cell.label, "sparsity": cell.method.sparsity, "mode": cell.mode}) not in done
    ]
    if not wanted:
        return common.say("all rows are there")
    with tempfile.TemporaryDirectory(prefix="rankfold-") as place:
        folder = args.work or Path(place) / "grid"
        try:
            rows = compare(source, wanted, tokens, measures, folder, on_row=lambda row: add(record, row))
        except RankfoldError as error:  # of all that is wanted: one that fails among others is a row
            sys.exit(f"not done: {error}")
    for row in rows:
        if _name(row) not in record:  # done by a process that was killed before it could say so
            add(record, row)
    common.say(f"wrote {common.shown(str(args.json))}")


def cells(forms: list[Form], only: list[str] | None, sparsities: list[float]) -> list[Cell]:
    """Of the methods wanted, those sparsities that each can have."""
    chosen = [form for form in forms if only is None or form.label in only]
    half, free = (
        [f for f in chosen if issubclass(method_class(f.name), TwoOfFour) == is_half] for is_half in (True, False)
    )
    found = cells_of(free, sparsities) if free else []
    return found + (cells_of(half, [0.5]) if half and 0.5 in sparsities else [])


def add(record: common.Record, row: dict) -> None:
    name = _name(row)
    record.drop(name)
    facts = {"setting": row["label"], "sparsity": row["sparsity"], "mode": row["mode"], "method": row["method"]}
    if row["status"] == "failed":
        record.add(name, **facts, error=row["error"])
        return common.say(f"{name}: {row['error']}")
    perplexities = {text["text"]: text["perplexity"] for text in row["measures"]["texts"]}
    counts = row["counts"]
    facts |= {"speed": row["measures"]["speed"]} if "speed" in row["measures"] else {}
    facts |= {"perplexity": perplexities, "removed": counts["sparsity"], "parameters": counts["parameters"]}
    damaged = bool((row["held_out"] or {}).get("warning"))
    record.add(name, **facts, zeros="zeros" in counts, damaged=damaged, compress_seconds=row["compress_seconds"])
    common.say(f"{name}: {', '.join(f'{value:.2f}' for value in perplexities.values())}")


def _name(row: dict) -> str:
    return row["label"] if row["mode"] is None else f"{row['label']} {row['sparsity']}"


def _dense(model: str, source):
    return load_model(common.model_path(model), dtype=dtype_name(source), device="cpu")


if __name__ == "__main__":
    main()
