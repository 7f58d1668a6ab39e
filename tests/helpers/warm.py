"""Python in a process of its own, without the seconds that imports take: forked from one that has made them.

It has what a run takes of transformers, and nothing of rankfold; with ``forked_from=TORCH`` nothing of transformers
either. A test of what happens before torch is imported needs ``subprocess``.
"""

import functools
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
TORCH = (
    *("torch.distributed.tensor", "torch._dynamo", "scipy.optimize", "accelerate", "huggingface_hub", "tokenizers"),
)  # most of what transformers imports
TRANSFORMERS = (
    *TORCH,
    *(
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.quantizers",
    ),
    *("transformers.models.llama.modeling_llama", "transformers.generation.utils", "transformers.processing_utils"),
    *("pydantic", "pydoc_data.topics", "rich.console", "rich.progress", "rich.table", "typer.core"),
)
RANKFOLD = "from few_probe_texts import score_few; score_few(); from rankfold.cli import main; main()"


@functools.cache
def server(modules: tuple[str, ...]) -> forkserver.ForkServer:
    """Return what forks a process that has imported these modules."""
    found = forkserver.ForkServer()
    found.set_forkserver_preload([*modules])
    return found


def start(
    code: str,
    *arguments: str,
    cwd=None,
    env: Mapping[str, str] | None = None,
    out=os.devnull,
    err=os.devnull,
    forked_from: tuple[str, ...] = TRANSFORMERS,
):
    """Start ``python -c CODE ARGUMENTS`` and return its process; its output goes to the files ``out`` and ``err``."""
    given = code, arguments, str(cwd or os.getcwd()), dict(os.environ if env is None else env), str(out), str(err)
    process = FORKS.Process(target=_run, args=given)
    forkserver.connect_to_new_process = server(forked_from).connect_to_new_process  # there is one server otherwise
    process.start()
    return process


def python(code: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    """Return how ``python -c CODE ARGUMENTS`` ended and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        process = start(code, *arguments, out=out, err=err, **options)
        process.join()
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def rankfold(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Return how ``rankfold ARGUMENTS`` ended and what it printed."""
    return python(RANKFOLD, *arguments, **options)


def _run(code: str, arguments: tuple[str, ...], cwd: str, env: dict[str, str], out: str, err: str) -> None:
    for descriptor, name in ((0, os.devnull), (1, out), (2, err)):
        file = os.open(name, os.O_RDWR | os.O_CREAT, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
