"""`make mutants`: change the source in one small place at a time; do the tests notice?

mutmut makes the mutants (`+` becomes `-`, an argument becomes None, …) and runs, for each, those tests out of
`PROTECTED` that reach the changed function. It works in a temporary copy; the checkout is only read. Of each file
`--most` mutants are drawn, always the same ones. The record holds every finished file: a killed run goes on with the
same command. A file is done again when it has changed, or had survivors and a test that protects it has changed; new
tests do not bring a killed mutant back, and without a record all is done anew. Why a survivor may stay:
`survivors.toml`.

What is not tried: texts for people (tests look for their facts with match=, their wording is free), ``strict`` of zip
(lists of another length would be a mistake of the code itself), annotations, docstrings, properties and other decorated
functions than those under ``torch.no_grad()``, and code outside functions.
"""

import ast
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from difflib import ndiff
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.stats import status_by_exit_code
from mutmut.utils.format_utils import get_mutant_name, orig_function_and_class_names_from_key
from mutmut_here import overlook_no_grad

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))  # the record is written like all others
import common  # noqa: E402

SOURCE = Path("src/rankfold")
SEED = 0
CONTRACTS = "tests/contracts/test_"
LATENT = [f"{CONTRACTS}{name}.py" for name in ("latentllm_errors", "latentllm", "options_matter")] + ["tests/methods"]
OF_LATENT = "errors or matter or methods or llama or opt"
TRUTH = [f"{CONTRACTS}{name}.py" for name in ("modegpt_truth", "grouped_queries")]
HELD_OUT, ENCODERS = "tests/compression/test_held_out.py", f"{CONTRACTS}encoders.py"
DEFAULT, SENSITIVITY, WHOLE = (f"{CONTRACTS}{name}.py" for name in ("rankfold", "output_weighting", "whole_modules"))
EXPERTS, OF_EXPERTS = f"{CONTRACTS}experts.py", "mixtral or gpt_oss or tokens or kept_of_a_block"
OF_NO_FAMILY = "not test_perplexities and not fitted_windows and not test_modegpt"
# Files -> the tests that should protect them, and which of these (-k): all families would take hours. A file goes by
# the first pattern that matches.
PROTECTED = {
    **dict.fromkeys(
        ("allocation/owl.py", "allocation/spectrum.py"),
        (
            [f"{CONTRACTS}shares_of_blocks.py", "tests/allocation/test_by_block.py"],
            "by_block or llama or opt or outliers or directions or ways",
        ),
    ),
    "allocation/by_cost.py": (
        ["tests/allocation", "tests/compression/test_duration.py", f"{CONTRACTS}removal.py"],
        "measured or search or sleb_removes or least_influence",
    ),
    "allocation/b[!y]*.py": (["tests/allocation", "tests/compression/test_budget.py"], ""),
    "allocation/*.py": (
        [
            "tests/allocation",
            "tests/methods/test_ranges.py",
            *(f"tests/compression/test_{name}.py" for name in ("plan", "budget")),
            "tests/test_quality_kept.py",
        ],
        "",
    ),
    "calibration/[!ef]*.py": (
        ["tests/calibration", HELD_OUT, *(f"{CONTRACTS}{name}.py" for name in ("modegpt", "bolaco"))],
        f"{OF_NO_FAMILY} and not test_bolaco or blocks_run_one_by_one or windows_matter",
    ),
    "calibration/experts.py": ([EXPERTS], OF_EXPERTS),
    "calibration/forward.py": (
        ["tests/calibration/test_runner.py", f"{CONTRACTS}projector.py"],
        "test_runner or given_whole or units_go and method0",
    ),
    "data/probes.py": (["tests/compression/test_probe_texts.py"], ""),
    "data/images.py": (["tests/data", f"{CONTRACTS}packed_towers.py"], "not packed or sizes or whole_model"),
    "data/tokens.py": (["tests/data", "tests/models/test_given.py"], "not given or too_few"),
    "data/*.py": (["tests/data"], ""),
    "evaluation/*.py": (["tests/evaluation"], ""),
    "recovery/*.py": (["tests/recovery"], "not weights-fp32 and not weights-bf16"),
    "compression/held_out.py": (
        [HELD_OUT, ENCODERS],
        f"{OF_NO_FAMILY} and not test_encoders or llama or opt or states_have_moved and modegpt",
    ),
    # Grouped queries, biases everywhere, neither rotation nor gate, half a rotation.
    "methods/modegpt/[!e]*.py": (
        [*TRUTH, SENSITIVITY, "tests/methods", HELD_OUT],
        "not truth and not held_out and not every_family"
        " or llama: or llama-bias: or opt: or phi: or llama-modegpt or opt-modegpt",
    ),
    "methods/modegpt/experts.py": ([EXPERTS], OF_EXPERTS),
    "methods/rankfold/*.py": ([DEFAULT, WHOLE], "not gemma2 and not phi and not gpt2 and not falcon and not cohere2"),
    "compression/kl_divergence.py": ([DEFAULT, WHOLE, ENCODERS], "costs or ranks"),
    "compression/importance.py": (
        [DEFAULT, SENSITIVITY, f"{CONTRACTS}modegpt.py", f"{CONTRACTS}shares_of_blocks.py"],
        "resumed or refused or moments_hold_no or influence_allocations and (llama or opt) "
        "or shares and (llama or opt)",
    ),
    "compression/block.py": ([DEFAULT, HELD_OUT], f"{OF_NO_FAMILY} or llama or opt"),
    "linalg/*.py": (["tests/linalg"], ""),
    "methods/baselines/block_removal.py": (
        [f"{CONTRACTS}removal.py"],
        "llama or opt or losses or sleb_removes or several or layer_types or one_block or depend_on",
    ),
    "methods/baselines/structured/*.py": ([f"{CONTRACTS}slicing_methods.py"], "llama or opt or key_head or flap_adds"),
    "methods/baselines/slicegpt/*.py": (
        [f"{CONTRACTS}slicegpt{name}.py" for name in ("", "_modegpt")],
        "llama or opt or refus or little or influence or every_module or leaves_alone or reached or suggests",
    ),
    "methods/baselines/semi_structured.py": (
        [f"{CONTRACTS}semi_structured_methods.py"],
        "llama- or opt- or sequential or widths or ridge or single or refused or does_not_take or experts",
    ),
    "methods/base.py": ([*LATENT, "tests/compression/test_budget.py"], f"{OF_LATENT} or refused or budget"),
    "methods/targets.py": (["tests/methods/test_targets.py"], ""),
    "methods/result.py": (LATENT, OF_LATENT),
    "methods/latentllm/options.py": (
        [
            "tests/compression/test_budget.py",
            *(
                f"{CONTRACTS}{name}.py"
                for name in ("latentllm", "latentllm_modules", "latentllm_options", "gradient_methods")
            ),
        ],
        "refused or said or fit or range or exclude or cannot",
    ),
    "methods/latentllm/s*.py": (
        [f"{CONTRACTS}{name}.py" for name in ("latentllm_options", "bolaco", "gradient_methods")],
        "llama or plain or stored or named or windows or alone or not_there",
    ),
    "methods/latentllm/experts.py": ([f"{CONTRACTS}latent_experts.py"], ""),
    "methods/latentllm/factor.py": (
        [f"{CONTRACTS}{name}.py" for name in ("latentllm_errors", "latentllm", "latentllm_options")],
        "errors or llama or stored",
    ),
    "methods/latentllm/[!fos]*.py": (LATENT, OF_LATENT),
}
# Seconds until a mutant counts as endless: (what its tests took + CONSTANT) * MULTIPLIER. Fixtures are in the constant;
# the factor leaves room for whatever else the machine does, or slow would look like endless.
MULTIPLIER, CONSTANT = 10, 5
SPINNER = tuple("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
SURVIVED = {"survived", "no tests"}
DEFINITIONS = {
    "mutants": "how many mutmut makes of the file that change more than a text for people or `strict` of a zip",
    "tried": "how many of them were run: a sample drawn with a fixed seed",
    "killed": "a test failed",
    "timed out": f"the tests took {MULTIPLIER} times as long as they should: an endless loop",
    "survived": "all tests passed, or no test reaches the function",
    "score": "(killed + timed out) / tried",
}


class Mutant(NamedTuple):
    """One change of one function."""

    function: str
    old: str  # the lines that change, as one
    new: str


class Target(NamedTuple):
    """A file, and what should notice when it changes."""

    path: Path  # relative to the root of the tree
    tests: tuple[str, ...]
    only: str  # pytest's -k

    @property
    def name(self) -> str:
        return str(self.path.relative_to(SOURCE))

    def digests(self, root: Path) -> dict[str, str]:
        """Of the file and of its tests."""
        tests = [f for test in self.tests for f in python_files(root, test)]
        return {"digest": digest(root, [self.path]), "digest_of_tests": digest(root, tests)}

    def is_done(self, row: dict) -> bool:
        now = self.digests(ROOT)
        return row["digest"] == now["digest"] and (
            not row["survived"] or row["digest_of_tests"] == now["digest_of_tests"]
        )


def main() -> None:
    parser = common.arguments(__doc__, "mutants")
    parser.add_argument("--most", type=int, default=6, metavar="N", help="mutants per file; 0: all (default: 6)")
    parser.add_argument("--only", nargs="+", metavar="FILE", help="these files only, like linalg/psd.py")
    args = parser.parse_args()
    os.chdir(ROOT)
    overlook_no_grad()
    known = list(targets())
    wanted = [t for t in known if args.only is None or t.name in args.only]
    if unknown := set(args.only or ()) - {t.name for t in known}:
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(t.name for t in known)}")
    config = {"most": args.most, "seed": SEED, "mutmut": version("mutmut")}
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    for gone in {row["name"] for row in record.value["rows"]} - {t.name for t in known}:
        record.drop(gone)
    groups = defaultdict(list)  # files with the same tests share a copy, in which mutmut keeps what it knows of these
    for target in wanted:
        if not any(row["name"] == target.name and target.is_done(row) for row in record.value["rows"]):
            groups[target.tests, target.only].append(target)
    for group in groups.values():
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            copy_tree(Path(folder), group)
            for target in group:
                try_file(target, Path(folder), args.most, record)


def digest(root: Path, files: list[Path]) -> str:
    return hashlib.sha256(b"".join((root / f).read_bytes() for f in files)).hexdigest()[:16]


def python_files(root: Path, test: str) -> list[Path]:
    """A file, or all of a folder, relative to ``root``."""
    path = root / test
    return [f.relative_to(root) for f in sorted(path.rglob("*.py"))] if path.is_dir() else [Path(test)]


def targets() -> Iterator[Target]:
    seen = set()
    for pattern, (tests, only) in PROTECTED.items():
        for path in sorted(set(SOURCE.glob(pattern)) - seen):
            seen.add(path)
            if "def " in path.read_text(encoding="utf-8"):
                yield Target(path, tuple(tests), only)


# ---------------------------------------------------------------------------------------------------------------------
# What mutmut makes of a file


def mutants(path: Path) -> dict[str, Mutant]:
    """mutmut's name -> mutant, in the order of the file."""
    made = mutate_file_contents(str(path), path.read_text(encoding="utf-8"))
    lines = made.code.splitlines(keepends=True)
    sources = {name: "".join(lines[s.start - 1 : s.end]) for name, s in made.line_span_by_function_name.items()}
    found = {}
    for name in made.mutant_names:
        before = sources[name.rpartition("_")[0] + "_orig"].replace("__mutmut_orig", "", 1)
        after = sources[name].replace(name, name.partition("__mutmut")[0], 1)
        if what_counts(before) != what_counts(after):
            full = get_mutant_name(path, name)
            function, owner = orig_function_and_class_names_from_key(full)
            found[full] = Mutant(f"{owner}.{function}" if owner else function, *change(before, after))
    return found


class WhatCounts(ast.NodeTransformer):
    def visit_Raise(self, node: ast.Raise) -> ast.Raise:
        if isinstance(node.exc, ast.Call):
            node.exc = node.exc.func
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) and " " in node.value else node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        if isinstance(node.func, ast.Name) and node.func.id == "zip":
            node.keywords = []
        return self.generic_visit(node)


def what_counts(function: str) -> str:
    """A function without what errors say, sentences and ``strict`` of its zips, to compare."""
    function = function.lstrip("\n")
    return ast.dump(WhatCounts().visit(ast.parse("class _:\n" + function if function[0] == " " else function)))


def change(before: str, after: str) -> tuple[str, str]:
    """The lines that differ, made one."""
    lines = list(ndiff(before.splitlines(), after.splitlines()))
    return tuple(" ".join(line[2:].strip() for line in lines if line[0] == sign) for sign in "-+")


# ---------------------------------------------------------------------------------------------------------------------
# Running them


def copy_tree(folder: Path, group: list[Target]) -> None:
    """What tests read, and mutmut's settings."""
    for name in ("src", "tests"):
        shutil.copytree(name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        (folder / "mutants" / name).mkdir(parents=True)  # what of PYTHONPATH is not there when Python starts stays so
    for name in ("docs", "benchmarks"):
        shutil.copytree(name, folder / "mutants" / name)  # pages and records that tests read
    settings = {
        "source_paths": ["src"],
        "only_mutate": [str(target.path) for target in group],
        "pytest_add_cli_args_test_selection": list(group[0].tests),
        "pytest_add_cli_args": ["-p", "no:cacheprovider", *(["-k", group[0].only] if group[0].only else [])],
        "timeout_multiplier": MULTIPLIER,
        "timeout_constant": CONSTANT,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]  # JSON's lists and strings are TOML's
    project = Path("pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text("\n".join([project, "[tool.mutmut]", *lines, ""]), encoding="utf-8")


def try_file(target: Target, folder: Path, most: int, record: common.Record) -> None:
    everything = mutants(target.path)
    if not everything:
        return
    names = list(everything)
    if most:
        names = random.Random(f"{SEED} {target.name}").sample(names, min(most, len(names)))
    results = run(names, target, folder)
    count = Counter(results.values())
    record.drop(target.name)
    record.add(
        target.name,
        mutants=len(everything),
        tried=len(names),
        killed=count["killed"],
        **{kind.replace(" ", "_"): found(kind, results, everything) for kind in ("timed out", "survived")},
        tests=[*target.tests, *(["-k", target.only] if target.only else [])],
        **target.digests(folder),  # the checkout may have moved on
    )
    common.say(f"{target.name}: {dict(count)} of {len(everything)}")


def found(kind: str, results: dict[str, str], everything: dict[str, Mutant]) -> list[dict]:
    return [everything[name]._asdict() for name in everything if results.get(name) == kind]


def run(names: list[str], target: Target, folder: Path) -> dict[str, str]:
    """Name -> what became of it."""
    paths = [str(folder / "mutants" / name) for name in ("src", "tests")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # mutmut forks after torch has run; more threads deadlock in the child
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),  # for tests that start processes
        "PYTHONHASHSEED": "0",
    }
    call = [sys.executable, ROOT / "scripts" / "mutmut_here.py", "run", "--max-children", "1", *names]
    done = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith(SPINNER)]
        sys.exit("\n".join([f"{target.name}: mutmut ended with {done.returncode}", *said[-60:]]))
    codes = json.loads((folder / "mutants" / f"{target.path}.meta").read_text(encoding="utf-8"))["exit_code_by_key"]
    return {name: outcome(codes[name]) for name in names}


def outcome(code: int | None) -> str:
    if code is None:
        sys.exit("mutmut left a mutant out; run again")
    status = status_by_exit_code[code]
    if status in SURVIVED:
        return "survived"
    return "timed out" if status == "timeout" or code == -9 else "killed"  # -9: beyond its limit of CPU time


if __name__ == "__main__":
    main()
