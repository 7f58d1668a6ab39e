"""Compressions that several processes share: what is run, and the processes that run it."""

import os
import socket
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import rankfold
import warm
from families import opened, tokens
from few_probe_texts import score_few
from kills import CHANGES, WRITES
from rankfold import make_method
from rankfold._utils.processes import joined
from rankfold.methods.base import NarrowingMethod
from rankfold.methods.registry import METHODS, method_class
from tiny_encoders import ENCODERS, opened_encoder, samples_of
from tiny_pairs import save_llava, write_pairs

SHARDS = 4
BOTH = "components"  # one after the other, in one run
WORKER = "import sys, shared_runs; shared_runs.work(sys.argv[1], sys.argv[2:])"


class Case(NamedTuple):
    """One compression of a tiny model."""

    method: str
    family: str = "llama"
    options: dict[str, Any] = {}  # noqa: RUF012 - read only
    mode: str = "sequential"


BASE = {
    "modegpt": Case("modegpt"),
    "modegpt parallel": Case("modegpt", mode="one-pass"),
    "rankfold": Case("rankfold"),
    "latentllm": Case("latentllm"),
    "experts": Case("rankfold", "mixtral"),
    "latent experts": Case("latentllm", "mixtral"),
    "encoder": Case("rankfold", "bert"),
}
HALF = {name: Case(name, options={"sparsity": 0.5}) for name in ("sparsegpt", "wanda", "pruner-zero")}
EVERY = (
    {name: Case(name, "mixtral" if method_class(name).needs_experts else "llama") for name in METHODS}
    | HALF
    | {
        "influence": Case("modegpt", options={"allocation": "influence"}, mode="one-pass"),
        "owl": Case("modegpt", options={"allocation": "owl"}, mode="one-pass"),
        "fisher": Case("modegpt", options={"output_weighting": "fisher"}),
        "measured fisher": Case("modegpt", options={"output_weighting": "fisher", "allocation": "measured"}),
        "windows": Case("modegpt", options={"allocation": "measured"}, mode="one-pass"),
        "experts parallel": Case("modegpt", "mixtral", mode="one-pass"),
        "sinks": Case("rankfold", "gpt_oss"),
        "opt": Case("rankfold", "opt"),
    }
)
CASES = BASE | {name: case for name, case in EVERY.items() if name not in BASE}


def compress(name: str, output: Path, shards: int = SHARDS, rows: int = 16) -> None:
    """Compress a tiny model as a case says, unless that is done."""
    if output.exists():
        return
    case = CASES[name]
    steps = {"rank_multiple": 2} if issubclass(method_class(case.method), NarrowingMethod) else {}
    method = make_method(case.method, **{"sparsity": 0.3} | steps | case.options)
    source = (opened_encoder if case.family in ENCODERS else opened)(case.family)
    data = samples_of(source) if case.family in ENCODERS else tokens(rows)
    rankfold.compress(source, method=method, calibration=replace(data, shards=shards), output=output, mode=case.mode)


def save_both(folder: Path) -> None:
    """Write a tiny model of images and text, and examples."""
    save_llava(folder / "dense")
    write_pairs(folder, 12)


def compress_both(output: Path, shards: int = SHARDS) -> None:
    """Compress both components of what :func:`save_both` wrote next to the folder of outputs, unless that is done."""
    if output.exists():
        return
    place, components = output.parent.parent / BOTH, []
    for name in ("vision", "language"):
        source = rankfold.open_model(place / "dense", device="cpu", component=name)
        data = rankfold.load_calibration(place / "pairs.jsonl", source, num_samples=8, shards=shards)
        components.append((source, make_method("modegpt", sparsity=0.3, rank_multiple=2), data))
    rankfold.compress_components(components, output)


def work(folder: str, names: list[str]) -> None:
    """Compress in turn, in one of several processes or alone."""
    torch.set_num_threads(1)
    score_few()
    if os.environ.get("RANK", "0") != "0":
        sys.addaudithook(partial(end_if_writing, folder))
    with joined():
        for name in names:
            (compress_both if name == BOTH else partial(compress, name))(Path(folder, name))


def end_if_writing(folder: str, event: str, details: tuple) -> None:
    """End a process that writes in a folder."""
    writes = event in CHANGES or (event == "open" and isinstance(details[2], int) and details[2] & WRITES)
    if writes and isinstance(details[0], str | bytes | os.PathLike) and os.fsdecode(details[0]).startswith(folder):
        os._exit(7)


def start(count: int, code: str, *arguments: str, folder: Path, env: dict[str, str] | None = None) -> list:
    """Start so many processes that share what they do; each writes ``out-N`` and ``err-N`` in the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = os.pathsep.join(path for path in sys.path if path)
    shared = dict(os.environ) | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": port, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)} | (env or {})
    return [
        warm.start(
            code,
            *arguments,
            env=shared | {"RANK": str(index), "LOCAL_RANK": str(index)},
            out=folder / f"out-{index}",
            err=folder / f"err-{index}",
        )
        for index in range(count)
    ]


def run(count: int, code: str, *arguments: str, folder: Path, **options) -> tuple[list[int | None], str, str]:
    """Return exit codes of so many processes, and what all of them printed; ``options`` of :func:`start`."""
    folder.mkdir(exist_ok=True)
    codes = join(start(count, code, *arguments, folder=folder, **options))
    out, err = ("".join((folder / f"{kind}-{i}").read_text() for i in range(count)) for kind in ("out", "err"))
    return codes, out, err


def join(processes: list, seconds: float = 120) -> list[int | None]:
    """Return the exit codes; ``None`` of a process that hangs, which is ended."""
    for process in processes:
        process.join(seconds)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.exitcode is None:
            process.kill()
    return codes
