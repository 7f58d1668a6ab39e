"""Speed in other engines, dense against compressed: llama.cpp's own `llama-bench`, and vLLM's own throughput benchmark.

Rounds run the models in turn; a ratio is formed within a round, and medians over rounds are reported: on a machine that
does something else beside, none of it means anything. llama.cpp is built by `llama_tools.py`; vLLM is the
environment of `integrations.py`.

    python benchmarks/engines.py
    python benchmarks/engines.py --only llama.cpp --rounds 15
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common
import llama_tools
import rankfold
from integrations import PROGRAMS, Models, Subject, environment, version
from llama_tools import ENVIRONMENT, NEW, PROMPT

IN_LLAMA_CPP = (Subject("rankfold", "llama.cpp"), Subject("rankfold", "llama.cpp", head_dim=48))
IN_VLLM = (Subject("rankfold", "vllm"), Subject("modegpt", "stock", "stock", head_dim=48))
REQUESTS = {"--num-prompts": 16, "--random-input-len": 256, "--random-output-len": NEW, "--max-model-len": 512}
THROUGHPUT = """
from vllm.benchmarks.throughput import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
DEFINITIONS = {
    "model": "method, options and --target of a compressed model, sparsity 0.3; for llama.cpp as gguf-deci, for vLLM "
    "the folder itself or `as` its export",
    "prefill": f"tokens per second of a prompt of {PROMPT}: llama-bench -p",
    "decode": f"tokens per second of {NEW} tokens one by one: llama-bench -n",
    "throughput": "tokens per second, read and written, of 16 requests of 256 and 64: `vllm bench throughput` with its "
    "random prompts, bf16",
    "rounds": "of which all speeds are the medians",
    "ratio": "over the dense model, within a round: median, and quartiles over the rounds",
    "bytes": "of the file, or of the weights in the folder",
}


def main() -> None:
    parser = common.arguments(__doc__, "engines")
    common.add_model(parser)
    common.add_data(parser)
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=list(ENGINES), help="engines; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder of the models; default: a temporary one")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds is at least 2: quartiles are reported")
    text = common.data_file(args.data, "text/wikitext2-valid.tokens")
    with tempfile.TemporaryDirectory(prefix="rankfold-") as place:
        models = Models(args.model, str(text), args.work or Path(place))
        config = {"model": common.describe_model(models.source), "text": common.shown(str(text))}
        config["threads"] = args.threads
        record = common.Record(args.json, config, DEFINITIONS, resume=True)
        dense = models.place / "dense"
        if not dense.exists():
            rankfold.save(models.source.whole_model(), dense, models.source.tokenizer)
        for engine in args.only:
            ENGINES[engine](record, models, dense, args)
    common.say(f"wrote {common.shown(str(args.json))}")


def in_llama_cpp(record: common.Record, models: Models, dense: Path, args) -> None:
    for dtype in ("float16", "q8_0"):
        if f"llama.cpp {dtype} dense" in record:
            continue
        files = {"dense": exported(dense, "gguf", dtype)}
        for subject in IN_LLAMA_CPP:
            files[subject.name] = exported(models.folders(subject)[0], "gguf-deci", dtype)
        facts = {"engine": "llama.cpp", "version": llama_tools.VERSION, "dtype": dtype}
        add(record, facts, files, lambda file: llama_tools.speeds(file, args.threads), args.rounds)


def in_vllm(record: common.Record, models: Models, dense: Path, args) -> None:
    if "vllm bfloat16 dense" in record:
        return
    python = environment("vllm", PROGRAMS["vllm"].packages)
    folders = {"dense": dense} | {subject.name: models.folders(subject)[0] for subject in IN_VLLM}
    facts = {"engine": "vllm", "version": version(python, PROGRAMS["vllm"].packages[0]), "dtype": "bfloat16"}
    add(record, facts, folders, lambda folder: throughput(python, folder), args.rounds)


ENGINES = {"llama.cpp": in_llama_cpp, "vllm": in_vllm}


def add(record: common.Record, facts: dict, models: dict[str, Path], measure, rounds: int) -> None:
    """One row for each model, the dense one last: where it is, all of them are."""
    found = {name: [] for name in models}
    for number in range(rounds):
        for name, path in models.items():
            found[name].append(measure(path))
            common.say(f"{facts['engine']} {facts['dtype']}, round {number + 1}, {name}: {found[name][-1]}")
    for name in (*(name for name in models if name != "dense"), "dense"):
        speeds = {what: statistics.median(one[what] for one in found[name]) for what in found[name][0]}
        row = facts | {"model": name, "rounds": rounds, "bytes": size(models[name])} | speeds
        for what in speeds if name != "dense" else ():
            mine, dense = ([one[what] for one in found[key]] for key in (name, "dense"))
            row[f"{what} ratio"], row[f"{what} ratio quartiles"] = common.compared(mine, dense)
        record.add(f"{facts['engine']} {facts['dtype']} {name}", **row)


def exported(folder: Path, form: str, dtype: str) -> Path:
    file = folder.with_name(f"{folder.name}-{dtype}.gguf")
    if not file.exists():
        rankfold.export(folder, file, form, dtype=dtype)
    return file


def size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.glob("*.safetensors"))


def throughput(python: Path, folder: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, "out.json")
        sizes = REQUESTS | {"--model": folder, "--dtype": "bfloat16", "--dataset-name": "random", "--output-json": out}
        command = [str(python), "-c", THROUGHPUT, *(str(part) for pair in sizes.items() for part in pair)]
        subprocess.run(command, check=True, stdout=sys.stderr, env=ENVIRONMENT | SETTINGS)
        return {"throughput": json.loads(out.read_text(encoding="utf-8"))["tokens_per_second"]}


if __name__ == "__main__":
    main()
