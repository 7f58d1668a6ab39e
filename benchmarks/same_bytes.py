"""Perplexity and speed against file bytes: the dense model and compressed ones, each in the formats of llama.cpp.

All of it runs in llama.cpp, by its own tools (`llama_tools.py` builds them): files are quantised by `llama-quantize`
with or without an importance matrix, or by `rankfold export`; perplexity is that of `llama-perplexity`, speed that of
`llama-bench`. Ranks are those of `--target llama.cpp`, or `stock` where files of the family have one width for all
MLPs. A killed run goes on with the file at which it was.

    python benchmarks/same_bytes.py
    python benchmarks/same_bytes.py --model $RANKFOLD_MODELS/stories260K --windows 4 --rounds 0  # seconds; no speeds
"""

import argparse
import os
import statistics
import tempfile
from functools import cached_property
from pathlib import Path

import common
import llama_tools
import rankfold
from rankfold.data.text import read_text
from rankfold.exports.gguf_size import is_one_width

DENSE = "dense"
OURS = {"Q5_0 by rankfold": "q5_0", "Q4_0 by rankfold": "q4_0"}
BY_IMATRIX = {f"{form} by imatrix": form for form in ("Q4_K_M", "Q4_0", "Q3_K_M")}
FORMATS = ("F16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_0", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K", *BY_IMATRIX, *OURS)
IMATRIX_WINDOWS = 64  # as many tokens as the calibration samples have
CONTEXT = 512  # the default of llama-perplexity
LONGEST = 8  # characters of a token, on average
CALIBRATION = "text/wikitext2-valid.tokens"
TEXTS = {"WikiText-2": "text/wikitext2-test.tokens", "C4": "calibration/c4_demo.jsonl"}
DEFINITIONS = {
    "model": "dense, or compressed by the default method at a sparsity, with `--target llama.cpp`, as gguf-deci; with "
    "`--target stock`, as gguf, where files of the family have one width for all MLPs",
    "format": "by rankfold: rounded for the calibration samples by `rankfold export`; others by llama-quantize, by "
    f"imatrix with an importance matrix of {IMATRIX_WINDOWS} windows of the calibration text",
    "bytes": "of the file",
    "perplexity": f"of the second half of every window of {CONTEXT} tokens, the same windows for all files: "
    "llama-perplexity",
    "divergence": "of its predictions from those of the dense model in F16, in the same places: mean Kullback-Leibler "
    "divergence in nats per token, llama-perplexity",
    "fallback": "matrices whose rows are no whole blocks of the format, which llama-quantize writes in the next larger "
    "one",
    "prefill": f"tokens per second of a prompt of {llama_tools.PROMPT}: llama-bench -p, median over rounds",
    "decode": f"tokens per second of {llama_tools.NEW} tokens one by one: llama-bench -n, median over rounds",
    "ratio": "over the dense model in F16, within a round: median over rounds",
}


def main() -> None:
    args = arguments(__doc__, "same_bytes", FORMATS).parse_args()
    with tempfile.TemporaryDirectory(prefix="rankfold-") as place:
        files = Files(args, args.work or Path(place))
        config = files.describe() | {"llama_cpp": llama_tools.VERSION}
        record = common.Record(args.json, config, DEFINITIONS, resume=True)
        record.value["benchmark"] = args.json.stem  # whose picture has a name of its own
        for sparsity in (0.0, *args.sparsities):
            add(record, files, sparsity)
    common.say(f"wrote {common.shown(str(args.json))}")


def arguments(doc: str, name: str, formats: tuple[str, ...]) -> argparse.ArgumentParser:
    """Return the options of a benchmark of files in several formats."""
    parser = common.arguments(doc, name)
    common.add_model(parser)
    common.add_data(parser)
    common.add_windows(parser)
    parser.add_argument("--sparsities", type=float, nargs="*", default=[0.1, 0.2, 0.3])
    parser.add_argument("--formats", nargs="+", choices=formats, default=list(formats))
    parser.add_argument("--windows", type=int, default=16, help="of each text")
    parser.add_argument("--rounds", type=int, default=5, help="of speed; 0: none")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder of the models; default: a temporary one")
    return parser


class Files:
    """The models as files, each written when it is first asked for, and the texts."""

    def __init__(self, args, place: Path):
        self.args, self.place = args, place
        place.mkdir(parents=True, exist_ok=True)
        self.source = common.open_source(args.model)
        self.tokens = common.calibration(args, self.source, CALIBRATION)

    @cached_property
    def texts(self) -> dict[str, Path]:
        """The texts as files, which drafts of the dense model do not need."""
        return {name: self._plain(name, file, self.args.windows) for name, file in TEXTS.items()}

    def describe(self) -> dict:
        """Return what the numbers depend on."""
        calibration = common.describe_tokens(self.tokens.ids, Path(CALIBRATION).name, self.tokens.seed)
        evaluation = {name: {"source": Path(file).name, "windows": self.args.windows} for name, file in TEXTS.items()}
        return {"model": common.describe_model(self.source), "calibration": calibration, "evaluation": evaluation}

    def folder(self, sparsity: float) -> Path:
        """Return a model as a checkpoint."""
        folder = self.place / f"model-{sparsity}"
        if sparsity and not (folder / "rankfold.json").exists():  # written last
            how = {"target": "llama.cpp"}
            if is_one_width(self.source):
                how = {"target": "stock", "allocation": "uniform", "rank_multiple": 32}
            method = rankfold.make_method("rankfold", sparsity=sparsity, **how)
            rankfold.compress(self.source, method=method, calibration=self.tokens, output=folder)
        elif not sparsity and not folder.exists():
            rankfold.save(self.source.whole_model(), folder, self.source.tokenizer)
        return folder

    def exact(self, sparsity: float) -> Path:
        """Return a model in F16."""
        file = self.place / f"{sparsity}-F16.gguf"
        if not file.exists():
            self._export(sparsity, file, dtype="float16")
        return file

    def _export(self, sparsity: float, file: Path, **how) -> None:
        form = "gguf-deci" if sparsity and not is_one_width(self.source) else "gguf"
        rankfold.export(self.folder(sparsity), file, form, **how)

    def quantised(self, sparsity: float, form: str) -> tuple[Path, int]:
        """Return a model in a format, and how many of its matrices fall back to another one."""
        exact = self.exact(sparsity)
        if form == "F16":
            return exact, 0
        file = exact.with_name(f"{sparsity}-{form}.gguf")
        if form in OURS:
            if not file.exists():
                self._export(sparsity, file, dtype=OURS[form], calibration=self.tokens)
            return file, 0
        # Always written anew: a killed run may have left a part.
        imatrix = self._imatrix(sparsity) if form in BY_IMATRIX else None
        return file, llama_tools.quantise(exact, file, BY_IMATRIX.get(form, form), self.args.threads, imatrix)

    def divergence(self, file: Path, text: str) -> float:
        """Return how far what a file predicts is from what the dense model in F16 does."""
        predictions, args = self.place / f"{text}.predictions", self.args
        if not predictions.exists():
            llama_tools.predict(self.exact(0.0), predictions, self.texts[text], CONTEXT, args.windows, args.threads)
        return llama_tools.divergence(file, predictions, CONTEXT, args.threads)

    def _imatrix(self, sparsity: float) -> Path:
        file = self.place / f"{sparsity}.imatrix"
        if not file.exists():
            text = self._plain("calibration", CALIBRATION, IMATRIX_WINDOWS)
            llama_tools.importance(self.exact(sparsity), file, text, CONTEXT, IMATRIX_WINDOWS, self.args.threads)
        return file

    def _plain(self, name: str, file: str, windows: int) -> Path:
        path = self.place / f"{name}.txt"
        text = read_text(str(common.data_file(self.args.data, file)), use="evaluation").joined()
        # The windows and no more: tokenising the whole text for every file takes longer than they do.
        path.write_text(text[: CONTEXT * LONGEST * (windows + 1)], encoding="utf-8")
        return path


def model_name(sparsity: float) -> str:
    return f"rankfold {sparsity}" if sparsity else DENSE


def add(record: common.Record, files: Files, sparsity: float) -> None:
    """Add the rows of one model that the record lacks, then the speeds that these lack."""
    args, model = files.args, model_name(sparsity)
    rows = {form: f"{model} {form}" for form in args.formats}
    for form, name in rows.items():
        if name in record:
            continue
        file, fallback = files.quantised(sparsity, form)
        found = {
            text: llama_tools.perplexity(file, path, CONTEXT, args.windows, args.threads)
            for text, path in files.texts.items()
        }
        diverged = {text: files.divergence(file, text) for text in files.texts}
        facts = {"model": model, "sparsity": sparsity, "format": form, "bytes": file.stat().st_size}
        record.add(name, **facts, fallback=fallback, perplexity=found, divergence=diverged)
        common.say(f"{name}: {found}, {diverged}")
    there = {row["name"]: row for row in record.value["rows"]}
    slow = {form: files.quantised(sparsity, form)[0] for form, name in rows.items() if "prefill" not in there[name]}
    if slow and args.rounds:
        for form, facts in measured(files.exact(0.0), slow, args).items():
            row = there[rows[form]] | facts
            record.drop(row["name"])
            record.add(**row)


def measured(dense: Path, found: dict[str, Path], args) -> dict[str, dict]:
    """Return the speeds of some files: rounds run them in turn with the dense model in F16."""
    rounds = []
    for number in range(args.rounds):
        common.say(f"speed, round {number + 1} of {args.rounds}")
        rounds.append({form: llama_tools.speeds(file, args.threads) for form, file in (found | {DENSE: dense}).items()})
    speeds = {}
    for form in found:
        speeds[form] = {"rounds": args.rounds, "threads": args.threads}
        for what in ("prefill", "decode"):
            ratios = [one[form][what] / one[DENSE][what] for one in rounds]
            speeds[form] |= {what: statistics.median(one[form][what] for one in rounds)}
            speeds[form] |= {f"{what} ratio": statistics.median(ratios)}
    return speeds


if __name__ == "__main__":
    main()
