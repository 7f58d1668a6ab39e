"""Who may import whom, and what must not be in the source at all. Read from the syntax tree, nothing is run."""

import ast
import sys
from pathlib import Path

import pytest

import rankfold

SRC = Path(rankfold.__file__).parent
FILES = sorted(SRC.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
# Part -> parts of rankfold it may import; architecture.md, "The house". A new part needs a line here.
MAY_IMPORT = {
    "_lazy": set(),
    "_registration": set(),  # imports `modules` by name, when transformers first builds a model
    "errors": set(),
    "arguments": {"errors"},
    "version": set(),
    "progress": set(),
    "stopwatch": set(),
    "memory": set(),
    "processor": set(),
    "linalg": set(),
    "modules": set(),  # made into one self-contained file beside every checkpoint
    "files": {"errors"},
    "locking": {"errors", "files"},
    "records": {"errors"},
    "architectures": {"errors"},
    "allocation": {"errors"},
    "calibration": {
        "architectures",
        "errors",
        "files",
        "linalg",
        "locking",
        "memory",
        "modules",
        "processor",
        "progress",
        "records",
        "stopwatch",
    },
    "methods": {"_lazy", "allocation", "architectures", "calibration", "errors", "linalg", "memory", "modules"},
    "checkpoint": {
        "architectures",
        "errors",
        "files",
        "linalg",
        "locking",
        "methods",
        "modules",
        "processor",
        "progress",
        "stopwatch",
        "version",
    },
    "report": {"errors", "files", "methods", "processor", "records", "version"},
    "evaluation": {
        "architectures",
        "budgets",
        "calibration",
        "checkpoint",
        "errors",
        "files",
        "memory",
        "methods",
        "modules",
        "processor",
        "progress",
        "report",
        "version",
    },
    "integrations": {"errors", "modules"},
    "exports": {
        "architectures",
        "checkpoint",
        "errors",
        "files",
        "linalg",
        "modules",
        "progress",
        "verifying",
        "version",
    },
    "distributed": {"calibration", "errors"},
}
ABOVE = {"cli", "comparison", "evaluation"}  # sit on top of the pipeline
STDLIB = set(sys.stdlib_module_names)
EXTERNAL = {
    "linalg": {"numpy", "torch"},
    "modules": {"torch", "transformers"},
    "architectures": {"torch"},
    "allocation": {"torch"},
    "methods": {"torch"},
}


def part_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def label(path: Path) -> str:
    return str(path.relative_to(SRC))


def imports(path: Path, nodes=None):
    """Absolute dotted names of everything a file imports, with lines."""
    package = ("rankfold", *path.relative_to(SRC).parts[:-1])
    for node in nodes if nodes is not None else ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            yield from ((".".join([*base, alias.name]), node.lineno) for alias in node.names)


def ours(path: Path):
    """Parts of rankfold that a file imports."""
    for name, line in imports(path):
        pieces = name.split(".")
        if pieces[0] == "rankfold":
            yield (pieces[1] if len(pieces) > 1 else "rankfold"), line


@pytest.mark.parametrize("path", FILES, ids=label)
def test_imports_go_one_way(path):
    part = part_of(path)
    if part in ("__init__", "__main__", "api", "cli", "comparison"):
        return
    found = [(p, line) for p, line in ours(path) if p != part]
    if part in (
        "pipeline",
        "parts",
        "budgets",
        "planning",
        "duration",
        "rates",
        "timing",
        "proving",
        "replacing",
        "verifying",
        "held_out",
        "probing",
        "destination",
        "effects",
        "scores",
        "redundancy",
        "stages",
    ):
        assert not [f for f in found if f[0] in ABOVE]
        return
    assert part in MAY_IMPORT, f"say in MAY_IMPORT what {part} may import"
    assert not [f for f in found if f[0] not in MAY_IMPORT[part]]


@pytest.mark.parametrize("path", FILES, ids=label)
def test_nothing_but_the_command_line_imports_the_command_line(path):
    assert part_of(path) in ("cli", "__main__") or not [f for f in ours(path) if f[0] == "cli"]


@pytest.mark.parametrize("path", [p for p in FILES if part_of(p) in EXTERNAL], ids=label)
def test_the_core_needs_torch_only(path):
    allowed = EXTERNAL[part_of(path)] | STDLIB | {"rankfold"}
    assert not [(n, line) for n, line in imports(path) if n.split(".")[0] not in allowed]


def test_no_module_imports_itself_in_a_circle():
    """At import time; imports inside functions are free."""
    names = {
        ".".join(("rankfold", *p.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__"): p for p in FILES
    }
    graph = {}
    for name, path in names.items():
        targets = {t for t, _ in imports(path, TREES[path].body)}
        graph[name] = {
            n for t in targets for n in (t, t.rpartition(".")[0]) if n in names and n not in (name, "rankfold")
        }
        graph[name] -= {name.rpartition(".")[0]}  # `from . import x` names the package itself
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def docstrings(tree: ast.AST) -> set[int]:
    """Ids of the constants that are docstrings."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef)
    firsts = [n.body[0] for n in ast.walk(tree) if isinstance(n, owners) and n.body]
    return {id(f.value) for f in firsts if isinstance(f, ast.Expr)}


@pytest.mark.parametrize("path", FILES, ids=label)
def test_no_device_is_named(path):
    """Device and dtype come from arguments and tensors; excepted: parsing the name, its help, the hardware record."""
    if label(path) in ("checkpoint/devices.py", "report/record.py", "cli/options.py"):
        return
    tree = TREES[path]
    skip = docstrings(tree)
    strings = [
        n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in skip
    ]
    assert not [(n.lineno, n.value) for n in strings if "cuda" in n.value]
    assert not [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "cuda"]


@pytest.mark.parametrize("path", FILES, ids=label)
def test_no_pickle(path):
    attributes = {ast.unparse(n) for n in ast.walk(TREES[path]) if isinstance(n, ast.Attribute)}
    assert not attributes & {"torch.save", "torch.load", "np.load", "numpy.load"}
    assert not {n for n, _ in imports(path)} & {"pickle", "joblib", "dill", "cloudpickle", "shelve"}


@pytest.mark.parametrize("path", FILES, ids=label)
def test_no_global_precision_flag(path):
    """The only one, scoped, is in the precision policy of the moments."""
    source = [ast.unparse(n) for n in ast.walk(TREES[path]) if isinstance(n, ast.Attribute)]
    flags = ("set_default_dtype", "set_default_device", "set_float32_matmul_precision", "allow_tf32", "set_num_threads")
    assert not [s for s in source if s.endswith(flags)]
    assert label(path) == "calibration/moments.py" or not [s for s in source if s.endswith("fp32_precision")]


@pytest.mark.parametrize("path", FILES, ids=label)
def test_no_failure_is_swallowed(path):
    """A handler of everything must raise again, and nothing is suppressed in bulk."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "BaseException"
            if caught in ("Exception", "BaseException"):
                assert any(isinstance(n, ast.Raise) for n in ast.walk(node)), f"line {node.lineno}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            assert "Exception" not in [ast.unparse(a) for a in node.args], f"line {node.lineno}"


@pytest.mark.parametrize("path", [p for p in FILES if part_of(p) != "cli"], ids=label)
def test_only_the_command_line_prints(path):
    calls = [n for n in ast.walk(TREES[path]) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    assert not [n.lineno for n in calls if n.func.id == "print"]


def test_the_public_names_are_there_and_sorted():
    assert rankfold.__all__ == sorted(rankfold.__all__)
    assert all(hasattr(rankfold, name) for name in rankfold.__all__)


@pytest.mark.parametrize("path", FILES, ids=label)
def test_what_a_file_lists_it_defines(path):
    tree = TREES[path]
    listed = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    if not listed:
        return
    checked = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    body = [*tree.body, *(n for block in checked for n in block.body)]  # test_startup.py imports what is lazy
    names = {
        alias.asname or alias.name for n in body if isinstance(n, ast.Import | ast.ImportFrom) for alias in n.names
    }
    names |= {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    for n in tree.body:
        targets = n.targets if isinstance(n, ast.Assign) else [n.target] if isinstance(n, ast.AnnAssign) else []
        names |= {t.id for target in targets for t in ast.walk(target) if isinstance(t, ast.Name)}
    assert not set(ast.literal_eval(listed[0])) - names
