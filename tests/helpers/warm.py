"""Python in a process of its own, without the seconds that importing torch takes: forked from one that has imported it.

The process that is forked has nothing of transformers and of rankfold. A test of what happens before torch is imported needs
``subprocess``.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
FORKS.set_forkserver_preload(
    ["torch.distributed.tensor", "torch._dynamo", "scipy.optimize", "accelerate", "huggingface_hub", "tokenizers"]
)  # most of what transformers imports
RANKFOLD = "from rankfold.cli import main; main()"


def start(code: str, *arguments: str, cwd=None, env: Mapping[str, str] | None = None, out=os.devnull, err=os.devnull):
    """Start ``python -c CODE ARGUMENTS`` and return its process; what it prints goes to the files ``out`` and ``err``."""
    given = code, arguments, str(cwd or os.getcwd()), dict(os.environ if env is None else env), str(out), str(err)
    process = FORKS.Process(target=_run, args=given)
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
