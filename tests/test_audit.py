"""The numbers of the README come out of the records, and the audit notices one that does not."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "audit.py"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def findings(text: str):
    return runpy.run_path(str(SCRIPT))["audit"](text)


def test_every_number_of_the_readme_comes_out_of_the_records():
    found = findings(README)
    assert [one for one in found if not one.passes] == []
    assert len(found) >= 40 and {"dense", "example", "families"} <= {
        word.strip(",") for one in found for word in one.what.split()
    }


def test_a_number_that_is_another_fails_by_name(capsys, tmp_path):
    line = next(line for line in README.split("\n") if line.startswith("| perplexity of SmolLM2"))
    numbers = line.split(" | ")
    changes = {line: " | ".join([*numbers[:2], "20.9", *numbers[3:]]), "82 model": "60 model", "32 x 1024": "32 x 2048"}
    changes |= {"× 1.21 as": "× 1.34 as", "× 1.43 in bf16": "× 1.53 in bf16"}
    changes |= {"x 1.66": "x 1.76", "PyTorch 2.9": "PyTorch 2.8", "106,168,320": "106,168,321,000"}
    for old, new in changes.items():
        failed = [one for one in findings(README.replace(old, new, 1)) if not one.passes]
        assert len(failed) == 1, (old, failed)
    other = tmp_path / "other.md"
    other.write_text(README.replace("82 model", "60 model"), encoding="utf-8")
    assert runpy.run_path(str(SCRIPT))["main"](other) == 1
    out = capsys.readouterr().out
    assert "FAIL  model families: 60, got 82" in out and out.splitlines()[-1].startswith("FAIL: ")


def test_a_row_that_no_record_vouches_for_fails():
    rows = [line for line in README.split("\n") if line.startswith("| zero-shot")]
    more = README.replace(rows[0], rows[0] + "\n| speed | 1 | 2 | 3 | 4 |")
    assert next(one.what for one in findings(more) if not one.passes) == "speed, dense"


def test_it_needs_the_standard_library_alone():
    names = {
        line.split()[1].split(".")[0]
        for line in SCRIPT.read_text(encoding="utf-8").splitlines()
        if line.startswith(("import ", "from "))
    }
    assert names <= sys.stdlib_module_names
