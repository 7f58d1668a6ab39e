"""The check of the wording finds what it is for; that the project has none is part of `make lint`."""

import ast
import runpy
from pathlib import Path

import pytest

PROSE = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "prose.py"))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("The record says which text.", ["record says"]),
        ("The scores do not see it, nor does its kin.", ["do not see", "kin"]),
        ("A norm behind the MLP, in front of the head.", ["behind", "in front of"]),
        ("It runs. What is left over goes beside it.", ["beside"]),
        ("What knows no modules takes an export.", ["What …"]),
        ("What is a rank? See `norms_after` and [the page](behind.md).", []),
        ("Which norms there are depends on the family.", ["Which …"]),
    ],
)
def test_findings(line, found):
    assert [what for _, what, _ in PROSE["findings"](PROSE["Text"]("page.md", 3, line))] == found


def test_a_message_of_several_lines_is_read_as_one():

    call = ast.parse('raise_(f"{name} lies behind " "the weights")', mode="eval").body
    assert PROSE["words_of"](call) == " lies behind the weights"
