"""The exception tree, and what the source raises."""

import ast
import functools
import re
from pathlib import Path

import pytest

import rankfold
from rankfold import errors
from rankfold.errors import called_by, method_option, option

SRC = Path(rankfold.__file__).parent
FILES = sorted(SRC.rglob("*.py"))
# Pure functions know no RankfoldError (the pipeline names the block and converts); the self-contained modelling file
# must not import one; the registry's ValueError and the abstract methods are for programmers.
BUILTIN = {
    # What Python asks of a module without the name; an unknown argument of a public function, as Python says it.
    "_utils": {"AttributeError", "TypeError", "kind"},
    "linalg": {"ValueError", "LinAlgError"},
    "calibration": {"IndexError", "ValueError"},  # of a sequence
    "modules": {"ValueError", "AttributeError", "NotImplementedError", "ImportError", "KeyError"},
    "methods": {"ValueError", "NotImplementedError"},
    "cli": {"Exit", "BadParameter"},
}


# Outside of rankfold.cli, command lines as such: of rankfold, in a card and a page, and of other programs.
COMMAND_LINES = (
    "rankfold comp",
    "rankfold recover {",
    "zero_to_fp32",
    "llama-gguf-split",
    "--include '",
    "--local-dir",
)


@functools.cache
def raised() -> list[tuple[Path, int, str, list[str]]]:
    """Return file, line, name and constant parts of the message of every ``raise Name(...)``."""
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                target = node.exc.func
                name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
                parts = [c.value for a in node.exc.args for c in ast.walk(a) if isinstance(c, ast.Constant)]
                found.append((path, node.lineno, name, [p for p in parts if isinstance(p, str)]))
    return found


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n[0].isupper() and n != "RankfoldError"])
def test_all_errors_have_one_base(name):
    assert issubclass(getattr(errors, name), errors.RankfoldError)


def test_a_wrong_option_is_also_a_value_error():
    with pytest.raises(ValueError, match="got 2"):
        raise errors.OptionError("got 2")
    assert not issubclass(errors.RankfoldError, ValueError)


def test_the_base_is_public():
    assert rankfold.RankfoldError is errors.RankfoldError and "RankfoldError" in rankfold.__all__


def test_what_is_raised_on_purpose_is_ours():
    ours = {n for n in errors.__all__ if n != "RankfoldError"} | {"_Stop", "_guard", "OptionError"}
    ours |= {"_lost", "_differ"}  # functions that return one
    allowed = {path: ours | BUILTIN.get(path.relative_to(SRC).parts[0], set()) for path in FILES}
    assert not [f"{path}:{line} raises {name}" for path, line, name, _ in raised() if name not in allowed[path]]


def test_messages_are_one_line():
    assert not [f"{path}:{line} {name}" for path, line, name, parts in raised() if any("\n" in p for p in parts)]


def test_only_the_command_line_writes_flags():
    """A message from elsewhere reaches Python's callers too: ``option`` names what they can give."""
    written = []
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree) if path.relative_to(SRC).parts[0] != "cli" else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                is_flag = re.search(r"(?<![\w-])--[a-z]", node.value)
                if is_flag and not any(line in node.value for line in COMMAND_LINES):
                    written.append(f"{path.relative_to(SRC)}:{node.lineno} {node.value!r}")
    assert not written


def test_a_suggestion_is_what_is_close_or_nothing():
    assert errors.suggestion("modgpt", ("latentllm", "modegpt")) == "did you mean 'modegpt'? "
    assert errors.suggestion("zzz", ("latentllm", "modegpt")) == ""
    assert errors.suggestion("x", ()) == ""


def test_the_first_line_of_an_error_is_short_and_never_empty():
    assert errors.first_line(ValueError("\n one \ntwo")) == "one"
    assert errors.first_line(ValueError("wrong field 'a':\n  expected int\nmore")) == "wrong field 'a': expected int"
    assert errors.first_line(ValueError("wrong:")) == "wrong:"
    assert errors.first_line(ImportError("\nIt needs a package. Read the\npage on it.")) == "It needs a package"
    assert errors.first_line(ValueError("one. Two\nThree")) == "one. Two"
    assert errors.first_line(ValueError("of float\nor bool")) == "of float"
    assert errors.first_line(ConnectionError()) == "ConnectionError"
    assert errors.first_line(KeyError("bias")) == "no entry 'bias'"
    assert errors.first_line(KeyError("two words")) == "'two words'"
    assert len(errors.first_line(ValueError("x" * 5000))) == 300


@pytest.mark.parametrize(
    ("caller", "expected"),
    [
        (
            "python",
            [
                "exclude_blocks=(0, -1)",
                "target='stock'",
                "rank_multiple",
                "ridge=1.0",
                "keep=True",
                "dtype='float32'",
                "method='x'",
            ],
        ),
        (
            "command",
            [
                "--exclude-blocks 0,-1",
                "--target stock",
                "--rank-multiple",
                "--set ridge=1.0",
                "--keep",
                "--dtype float32",
                "--method x",
            ],
        ),
        (
            "compare",
            [
                "METHOD:exclude_blocks=0+-1",
                "METHOD:target=stock",
                "METHOD:rank_multiple=...",
                "METHOD:ridge=1.0",
                "--keep",
                "--dtype float32",
                "method x",
            ],
        ),
    ],
)
def test_options_are_named_as_the_caller_gives_them(caller, expected):
    with called_by(caller):
        named = [
            method_option("exclude_blocks", (0, -1)),
            method_option("target", "stock"),
            method_option("rank_multiple"),
            method_option("ridge", 1.0),
        ]
        named += [option("keep", True), option("dtype", "float32"), option("method", "x")]
        assert named == expected
    assert option("keep", True) == "keep=True"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("plan {} --sparsity 0.99 --calibration {} --device cpu", "lower --rank-multiple"),
        (
            "compare {} --methods modegpt --sparsities 0.99 --calibration {} --text {} --device cpu -o {}",
            "lower METHOD:rank_multiple=...",
        ),
    ],
)
def test_a_command_refuses_in_its_own_words(tmp_path, capsys, monkeypatch, line, expected):
    from rankfold.cli import main
    from saved import save_text, save_tiny

    model, text = save_tiny(tmp_path / "model"), tmp_path / "text.txt"
    save_text(text)
    line = line.format(model, text, text, tmp_path / "out").split()
    monkeypatch.setattr("sys.argv", ["rankfold", *line])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert expected in capsys.readouterr().err
