"""Pages of the docs that are made from code and records are what these say now."""

import re
import runpy
from pathlib import Path

import pytest

from rankfold.methods import METHODS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pages():
    return runpy.run_path(str(ROOT / "scripts" / "pages.py"))["PAGES"]


@pytest.mark.parametrize("name", ["models", "methods", "commands"])
def test_the_page_is_what_the_code_says(pages, name):
    assert (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") == pages[name](), "run python scripts/pages.py"


def test_every_method_and_command_has_a_section(pages):
    methods, commands = pages["methods"](), pages["commands"]()
    assert all(f"\n### {name}\n" in methods for name in METHODS)
    assert commands.count("\n## `rankfold ") == 13
    assert "```bash\nrankfold compress" in commands


def test_the_lines_of_own_code_beside_libraries_are_about_as_many_as_the_table_says():
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    said = {name: int(count) for name, count in re.findall(r"\(`(\w+/\w+\.py)`, (\d+)\)", table)}
    assert len(said) == 8
    for name, count in said.items():
        lines = len((ROOT / "src" / "rankfold" / name).read_text(encoding="utf-8").splitlines())
        assert abs(lines - count) <= 0.1 * lines, f"{name} has {lines} lines"
