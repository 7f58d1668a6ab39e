"""Find the wordings that the project does not use, in documents, help texts, public docstrings and error messages.

python scripts/prose.py            # every finding, and their number; exit code 1 where there are any
python scripts/prose.py --count    # the numbers by word only
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MADE = {"commands.md", "methods.md", "models.md"}  # out of scripts/pages, help texts and docstrings, read there
THINGS = (
    "model|run|plan|config|record|matrix|matrices|method|text|command|test|spec|code|page|module|file|it|that|which"
)
VERBS = "says?|tells?|sees?|knows?|wants?|said|told|saw|knew|wanted"
# Wording -> what to write instead. In order: the first that fits is reported.
WORDS = {
    rf"\b(?:{THINGS})s? (?:{VERBS})\b": "a thing says nothing: state it, reports, contains, needs",
    r"\bhas? no say\b|\bhave no say\b": "has no effect",
    r"\b(?:do|does|did|can|could) not (?:say|see|know|want)\b": "a thing sees nothing: ignores, lacks, does not name",
    r"\b(?:knows?|sees?|says?) nothing\b": "a thing says nothing: ignores, does not use, there is no …",
    r"\bkin\b": "relatives, similar methods",
    r"\bbehind\b": "after",
    r"\bin front of\b": "before",
    r"\bbeside\b": "with, next to, in addition to",
    r"\bgone\b": "removed",
    r"\bdear\b": "costs, expensive",
    r"\bcalled damaged\b": "marked as damaged",
    r"\bat hand\b": "the given",
    r"\b(?:held-out|calibration|token|per|first|short|every) windows?\b|\bwindows? of (?:text|tokens)\b": (
        "sample, sequence"
    ),
    r"--(?:samples|length|of|for|protect|multiple|tasks-from|against|field|option)(?![\w-])": (
        "an earlier name of an option"
    ),
}
STARTS = re.compile(r"(?:^|(?<=[.!] ))(What|Of|Which) (?!is |are |does |do |if )[^?.]*(?:[.:]|$)")


class Text(NamedTuple):
    """A stretch of prose, and the line it begins on."""

    file: str
    line: int
    text: str


def findings(text: Text) -> Iterator[tuple[str, str, str]]:
    """Yield where, what and the advice of every wording that is not used."""
    for number, line in enumerate(text.text.splitlines()):
        place = f"{text.file}:{text.line + number}"
        plain = re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)
        for pattern, advice in WORDS.items():
            for found in re.finditer(pattern, plain, re.IGNORECASE):
                yield place, found[0], advice
        if found := STARTS.search(plain.strip()):
            yield place, f"{found[1]} …", "subject, verb, object: begin with the subject"


def documents() -> Iterator[Text]:
    """Yield the README and the pages of the documentation without their code, tables and headings."""
    docs, texts = ROOT / "docs", ROOT / "scripts" / "pages"
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(docs.glob("*.md")), *sorted(texts.glob("*.md"))]
    for page in pages:
        if page.parent == docs and page.name in MADE:
            continue
        text = re.sub(
            r"```.*?```", lambda code: "\n" * code[0].count("\n"), page.read_text(encoding="utf-8"), flags=re.S
        )
        lines = ["" if line.startswith("#") else line for line in text.splitlines()]
        yield Text(str(page.relative_to(ROOT)), 1, "\n".join(lines))


def strings() -> Iterator[Text]:
    """Yield help texts, docstrings of the public API and of commands, and messages of errors and of the log."""
    for file in sorted((ROOT / "src").rglob("*.py")):
        if file.parent.name == "modules":  # copied into every checkpoint, whose bytes would change
            continue
        name, tree = str(file.relative_to(ROOT)), ast.parse(file.read_text(encoding="utf-8"))
        is_public = file.name in ("api.py", "recover.py", "load.py", "saving.py", "hub.py") or file.parent.name == "cli"
        for node in ast.walk(tree):
            if is_public and has_docstring(node):
                yield Text(name, node.body[0].lineno, str(ast.get_docstring(node, clean=False)))
            for found in [node.exc] if isinstance(node, ast.Raise) and node.exc else [node]:
                if isinstance(found, ast.Call) and (isinstance(node, ast.Raise) or is_said(found)):
                    yield Text(name, found.lineno, words_of(found))


def has_docstring(node: ast.AST) -> bool:
    """Tell whether a node is a public function or class with a docstring."""
    is_one = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    return is_one and ast.get_docstring(node) is not None


def is_said(call: ast.Call) -> bool:
    """Tell whether a call is given a text that a user reads: a help text, a rule of options, or a line of the log."""
    logs = isinstance(call.func, ast.Attribute) and call.func.attr in ("warning", "info", "error")
    rules = isinstance(call.func, ast.Name) and call.func.id in ("Needs", "Excludes")
    return logs or rules or any(keyword.arg == "help" for keyword in call.keywords)


def words_of(call: ast.Call) -> str:
    """Return the literal parts of all strings that a call is given."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    parts = [part for value in given for part in ast.walk(value) if isinstance(part, ast.Constant)]
    return " ".join(part.value.replace("\n", " ") for part in parts if isinstance(part.value, str))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true", help="print numbers only")
    found = sorted({item for text in (*documents(), *strings()) for item in findings(text)})
    if not parser.parse_args().count:
        print(*(f"{place}: {what!r}: {advice}" for place, what, advice in found), sep="\n")
    print(
        *(f"{number:5} {what}" for what, number in Counter(what.lower() for _, what, _ in found).most_common()),
        sep="\n",
    )
    print(f"{len(found)} findings")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
