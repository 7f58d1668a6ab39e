"""The scripts in benchmarks/ take hours and no test runs them; what they import from rankfold is looked for here."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_everything_a_script_imports_from_rankfold_is_there(path):
    missing = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rankfold":
            module = importlib.import_module(node.module)
            missing += [
                f"{node.module}.{name.name}"
                for name in node.names
                if not hasattr(module, name.name) and not _is_module(node.module, name.name)
            ]
    assert not missing


def _is_module(package: str, name: str) -> bool:
    return importlib.util.find_spec(f"{package}.{name}") is not None


def test_the_scripts_are_found():
    assert {"render", "studies"} <= {path.stem for path in SCRIPTS}


def test_the_table_of_the_readme_is_what_the_records_say(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS[0].parent)
    table = importlib.import_module("readme_table").table(SCRIPTS[0].parent / "results")
    readme = (SCRIPTS[0].parents[1] / "README.md").read_text(encoding="utf-8")
    assert "\n\n" + "\n".join(table) + "\n\n" in readme
