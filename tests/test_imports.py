"""What must not be in the source and no linter looks for. Import-linter has the layers (pyproject.toml)."""

import ast
from pathlib import Path

import rankfold

SRC = Path(rankfold.__file__).parent
TREES = {str(path.relative_to(SRC)): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SRC.rglob("*.py"))}
# Where a device is parsed, described, or written down.
NAME_DEVICES = ("models/devices.py", "report/record.py", "cli/options.py")


def docstrings(tree: ast.AST) -> set[int]:
    """Ids of the constants that are docstrings."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef)
    firsts = [n.body[0] for n in ast.walk(tree) if isinstance(n, owners) and n.body]
    return {id(f.value) for f in firsts if isinstance(f, ast.Expr)}


def test_no_device_is_named():
    """Device and dtype come from arguments and tensors."""
    found = []
    for path, tree in TREES.items():
        skip = docstrings(tree)
        for n in ast.walk(tree):
            named = isinstance(n, ast.Constant) and isinstance(n.value, str) and "cuda" in n.value and id(n) not in skip
            if named or (isinstance(n, ast.Attribute) and n.attr == "cuda"):
                found.append((path, n.lineno))
    assert not [place for place in found if place[0] not in NAME_DEVICES]


def test_nothing_is_suppressed_in_bulk():
    calls = [(path, n) for path, tree in TREES.items() for n in ast.walk(tree) if isinstance(n, ast.Call)]
    suppressed = [(path, n) for path, n in calls if ast.unparse(n.func).endswith("suppress")]
    assert not [
        (path, n.lineno) for path, n in suppressed if {"Exception", "BaseException"} & {*map(ast.unparse, n.args)}
    ]


def test_the_public_names_are_there_and_sorted():
    assert rankfold.__all__ == sorted(rankfold.__all__)
    assert all(hasattr(rankfold, name) for name in rankfold.__all__)


def test_no_two_classes_have_one_name():
    """But for private ones."""
    found = [
        (n.name, path)
        for path, tree in TREES.items()
        for n in tree.body
        if isinstance(n, ast.ClassDef) and not n.name.startswith("_")
    ]
    names = [name for name, _ in found]
    assert not [pair for pair in found if names.count(pair[0]) > 1]
