"""What the probe texts say of a run, beside whole texts of the same kinds, and what source code in the calibration gives back.

Calibrated on WikiText-2 validation alone, and on as many windows of which 30 % are source code (modules of Python's standard
library); evaluated on WikiText-2 test, C4 and other modules of that library. A killed run goes on where it was.

    python benchmarks/probe_texts.py
    python benchmarks/probe_texts.py --model "$RANKFOLD_MODELS/qwen2.5-coder-0.5b.gguf" \\
        --json benchmarks/results/probe_texts_coder.json
"""

import sysconfig
import tempfile
from pathlib import Path

import common
from rankfold import CalibrationData, compress, load_calibration, make_method, perplexity

CALIBRATED = (
    "argparse ast bdb calendar cmd configparser csv dataclasses datetime difflib doctest enum fractions ftplib "
    "functools gettext heapq imaplib inspect mailbox optparse pathlib pdb pickle platform plistlib random shutil socket"
)
EVALUATED = "string subprocess tarfile textwrap threading tokenize trace traceback typing uuid weakref zipfile"
CALIBRATIONS = {
    "wikitext2": {"wikitext2": 1.0},
    "wikitext2 + source code": {"wikitext2": 0.7, "source code": 0.3},
}
WINDOWS = 8  # of every text that is evaluated on
DEFINITIONS = {
    "held_out, probe_texts": "as in rankfold.json: perplexities on held-out calibration windows and on every kind of probe "
    "text, their ratio, and the standard error of its logarithm",
    "perplexity": "text -> exp of the mean negative log-likelihood per predicted token, windows as long as in calibration",
}


def main() -> None:
    parser = common.arguments(__doc__, "probe_texts_smollm2")
    common.add_source(parser)
    common.add_data(parser)
    common.add_windows(parser)
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--method", default="rankfold")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=CALIBRATIONS, default=[*CALIBRATIONS])
    args = parser.parse_args()
    source = common.open_source(args.model, autocast=args.autocast)
    with tempfile.TemporaryDirectory() as folder:
        fitted, texts = read(Path(folder), args)
        windows = {name: common.windows(source, path, args.length)[:WINDOWS] for name, path in texts.items()}
        config = {
            "model": common.describe_model(source),
            "precision": common.precision(source),
            "method": args.method,
            "sparsity": args.sparsity,
            "calibration": {name: getattr(args, name) for name in ("samples", "length", "seed")},
            "evaluation": {name: common.describe_tokens(some, name) for name, some in windows.items()},
        }
        record = common.Record(args.json, config, DEFINITIONS, resume=True)
        if "dense" not in record:
            record.add("dense", perplexity=evaluated(source.whole_model(), windows, source))
        for name in args.only:
            if name not in record:
                shares = {str(fitted[text]): share for text, share in CALIBRATIONS[name].items()}
                tokens = load_calibration(
                    shares, source, num_samples=args.samples, max_length=args.length, seed=args.seed
                )
                record.add(name, **measured(source, args, tokens, windows))
                common.say(f"{name}: {record.value['rows'][-1]['perplexity']}")
    common.say(f"wrote {common.shown(str(args.json))}")


def measured(source, args, tokens: CalibrationData, windows: dict) -> dict:
    """What the run says, and what whole texts say."""
    model = compress(source, method=make_method(args.method, sparsity=args.sparsity), calibration=tokens).model
    found = model.config.quantization_config.fields
    return {
        "held_out": found["held_out"],
        "probe_texts": found["probe_texts"],
        "perplexity": evaluated(model, windows, source),
    }


def read(folder: Path, args) -> tuple[dict[str, Path], dict[str, Path]]:
    """Texts to calibrate on, and texts to evaluate on."""
    code = {}
    for name, modules in (("calibrated", CALIBRATED), ("source code", EVALUATED)):
        code[name] = folder / f"{name.replace(' ', '_')}.txt"
        files = [Path(sysconfig.get_path("stdlib")) / f"{module}.py" for module in modules.split()]
        code[name].write_text("\n\n".join(file.read_text(encoding="utf-8") for file in files), encoding="utf-8")
    fitted = {
        "wikitext2": common.data_file(args.data, "text/wikitext2-valid.tokens"),
        "source code": code["calibrated"],
    }
    return fitted, {
        "wikitext2 test": common.data_file(args.data, "text/wikitext2-test.tokens"),
        "c4": common.data_file(args.data, "calibration/c4_demo.jsonl"),
        "source code": code["source code"],
    }


def evaluated(model, windows: dict, source) -> dict[str, float]:
    return {name: perplexity(model, some, autocast=source.autocast)["perplexity"] for name, some in windows.items()}


def table(record: dict) -> list[str]:
    """A row for every kind of text: dense perplexity, and the ratio after each calibration."""
    config, (dense, *rows) = record["config"], record["rows"]
    text = config["calibration"]
    what = (
        f"{config['model']['name']}, `{config['method']}` at sparsity {config['sparsity']}, calibrated on {text['samples']} x "
        f"{text['length']} tokens. Perplexity of the compressed over that of the dense model."
    )
    lines = ["| text | dense | " + " | ".join(f"calibrated on {row['name']}" for row in rows) + " |"]
    lines.append("|---|" + "---|" * (len(rows) + 1))
    held_out = [f"× {row['held_out']['ratio']:.2f}" for row in rows]
    lines.append(f"| held-out calibration windows | | {' | '.join(held_out)} |")
    for kind, facts in rows[0]["probe_texts"]["kinds"].items():
        ratios = [_probed(row["probe_texts"]["kinds"][kind]) for row in rows]
        lines.append(f"| probe texts: {kind} | {facts['perplexity_dense']:.2f} | {' | '.join(ratios)} |")
    for name, before in dense["perplexity"].items():
        ratios = [f"× {row['perplexity'][name] / before:.2f}" for row in rows]
        lines.append(f"| whole text: {name} | {before:.2f} | {' | '.join(ratios)} |")
    return [what, "", *lines]


def _probed(facts: dict) -> str:
    ratio = f"× {facts['ratio']:.2f} ± {facts['ratio'] * facts['standard_error']:.2f}"
    return f"**{ratio}**" if facts["is_damaged"] else ratio


if __name__ == "__main__":
    main()
