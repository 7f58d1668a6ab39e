"""Zero-shot accuracy of named settings by lm-eval, one after another; a killed run keeps its rows and goes on where it was.

SmolLM2-135M, calibrated as for the tables of perplexity (32 x 1024 tokens of WikiText-2 validation, seed 0); PIQA, ARC-easy,
WinoGrande and LAMBADA from local rows, the first `--limit` questions of each. Forward in bf16 autocast where the processor
has it.

    python benchmarks/zero_shot.py
    python benchmarks/zero_shot.py --only dense rankfold --sparsity 0.2
"""

import gc
import math
import time
from importlib import metadata
from pathlib import Path

import common
from rankfold import compress, make_method
from rankfold.checkpoint.load import load_tokenizer
from rankfold.evaluation.local_tasks import local_rows
from rankfold.evaluation.tasks import evaluate_tasks

TASKS = ("piqa", "arc_easy", "winogrande", "lambada_openai")
SPARSITIES = (0.2, 0.3)
SETTINGS = {
    "rankfold": ("rankfold", {}),
    "modegpt": ("modegpt", {}),
    common.MODULE_FORMS_NAME: ("modegpt", common.MODULE_FORMS),
    "latentllm (joint)": ("latentllm", {}),
}
DEFINITIONS = {
    "acc": "lm-eval's: the choice with the highest log-likelihood is the right one; LAMBADA: every token of the last word is "
    "the most likely one",
    "stderr": "lm-eval's standard error of the mean over questions",
    "mean": "of the accuracies of the tasks; its error: root of the sum of their squared errors, over their number",
    "questions": "the first rows of each file; ARC-easy's file is the validation split, where lm-eval takes the test split",
    "compress_seconds": "from an open model to the compressed model in memory, calibration included",
}


def main() -> None:
    parser = common.arguments(__doc__, "zero_shot_smollm2")
    common.add_source(parser)
    common.add_data(parser)
    common.add_windows(parser)
    parser.add_argument("--limit", type=int, default=400, metavar="N", help="the first N questions of each task")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=("dense", *SETTINGS), help="default: all")
    parser.add_argument("--sparsity", type=float, nargs="+", default=SPARSITIES, help="default: 0.2 and 0.3")
    args = parser.parse_args()
    source = common.open_source(args.model, autocast=args.autocast)
    text = common.data_file(args.data, "text/wikitext2-valid.tokens")
    folder = common.data_file(args.data, "tasks/piqa_val.jsonl").parent
    tokens = common.calibration(source, text, args)
    config = {
        "model": common.describe_model(source),
        "precision": common.precision(source),
        "calibration": common.describe_tokens(tokens.ids, text, tokens.seed),
        "tasks": {name: local_rows(name, folder, None)["test"].name for name in TASKS},
        "limit": args.limit,
        "lm_eval": metadata.version("lm_eval"),
    }
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    wanted = args.only or ["dense", *SETTINGS]
    measure = Measure(source, load_tokenizer(common.model_path(args.model)), folder, args)
    if "dense" in wanted and "dense" not in record:
        measure.add(record, "dense", source.whole_model(), sparsity=0.0)
    for setting, (method, options) in SETTINGS.items():
        for sparsity in args.sparsity:
            name = f"{setting} {sparsity}"
            if setting in wanted and name not in record:
                chosen = make_method(method, sparsity=sparsity, **options)
                begin = time.perf_counter()
                model = compress(source, method=chosen, calibration=tokens).model
                facts = {"compress_seconds": time.perf_counter() - begin, "method": chosen.describe()}
                measure.add(record, name, model, setting=setting, sparsity=sparsity, **facts)
    common.say(f"wrote {common.shown(str(args.json))}")


class Measure:
    """Runs the tasks on a model and keeps the row."""

    def __init__(self, source, tokenizer, folder: Path, args):
        self.source, self.tokenizer, self.folder, self.args = source, tokenizer, folder, args

    def add(self, record: common.Record, name: str, model, **facts) -> None:
        begin = time.perf_counter()
        found = evaluate_tasks(
            model,
            self.tokenizer,
            TASKS,
            folder=self.folder,
            limit=self.args.limit,
            batch_size=self.args.batch_size,
            autocast=self.source.autocast,
        )
        errors = [task["acc_stderr"] for task in found.values()]
        mean = sum(task["acc"] for task in found.values()) / len(found)
        spread = math.sqrt(sum(error**2 for error in errors)) / len(errors)
        facts |= {"tasks": found, "mean": mean, "mean_stderr": spread}
        record.add(name, **facts, evaluate_seconds=time.perf_counter() - begin)
        common.say(f"{name}: {mean:.4f} ± {spread:.4f}")
        gc.collect()


if __name__ == "__main__":
    main()
