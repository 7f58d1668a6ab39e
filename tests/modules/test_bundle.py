"""The one file beside the weights holds what the package holds. That it computes the same: e2e/test_remote_code.py."""

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest

import rankfold.modules as modules
from rankfold.modules import CODE_FILE, code
from rankfold.modules.bundle import PARTS, bundle

FOLDER = Path(modules.__file__).parent
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.Assign)


def defined(source: str) -> list[tuple[str, str]]:
    """Names defined at the top of a file, and their code."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, DEFINITIONS):
            name = node.targets[0].id if isinstance(node, ast.Assign) else node.name
            found.append((name, ast.dump(node)))
    return found


def test_every_definition_of_every_part_is_there_once():
    parts = [FOLDER / f"{part}.py" for part in PARTS]
    assert set(parts) == set(FOLDER.glob("*.py")) - {FOLDER / "__init__.py"}
    wanted = [d for part in parts for d in defined(part.read_text(encoding="utf-8")) if d[0] != "__all__"]
    assert defined(code()) == wanted
    assert (
        max(Counter(name for name, _ in wanted).values()) == 1
    )  # two parts with one private name would shadow each other


def test_it_imports_torch_and_transformers_only():
    for node in ast.walk(ast.parse(code())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert not node.level
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            assert name.partition(".")[0] in {"torch", "transformers"} | sys.stdlib_module_names


def test_parts_come_after_what_they_import():
    for i, part in enumerate(PARTS):
        for node in ast.parse((FOLDER / f"{part}.py").read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.module in PARTS[:i]


def test_no_copy_of_it_is_in_the_package():
    """It is made when a checkpoint is written; a copy could drift."""
    assert not list(FOLDER.glob(f"**/{CODE_FILE}"))


def test_bundling_a_bundle_runs_and_the_file_gives_itself(tmp_path):
    (tmp_path / CODE_FILE).write_text(code(), encoding="utf-8")
    space = {"__file__": str(tmp_path / CODE_FILE), "__name__": "modeling_rankfold"}
    exec(compile(code(), CODE_FILE, "exec"), space)
    assert space["code"]() == code()
    assert space["FORMAT"] == modules.FORMAT


@pytest.mark.parametrize(
    "source", ['"""T."""\n\nimport os\nfrom math import (\n    pi,\n)\n\n__all__ = [\n    "a",\n]\n\na = pi\n']
)
def test_imports_of_several_lines_are_moved_whole(source):
    expected = "from math import pi\nimport os\n\n\n# T.\n\n\na = pi\n"
    assert bundle([source]).endswith('"""\n\n' + expected)
