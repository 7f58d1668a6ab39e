"""What the commands print of probe texts, of guessing, and of more that is removed than was asked for."""

import json
import re

import pytest

from rankfold.data.probes import KINDS
from saved import save_text, save_tiny

CALIBRATION = "--calibration text.txt --num-samples 8 --max-length 64 --device cpu"
# Random models, and texts that trained ones do not read.
GUESSING = "no better than guessing"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe-texts")
    save_tiny(folder / "model", blocks=2)
    save_text(folder / "text.txt")
    return folder


def assert_a_line_for_every_kind(text: str) -> None:
    for kind in KINDS:
        (line,) = (line for line in text.splitlines() if line.startswith(f"    {kind} "))
        assert re.fullmatch(rf"    {kind} +[\d.]+ +[\d.]+  x [\d.]+ ± [\d.]+ on \d+ probe texts?.*", line)


def test_summary_record_card_and_inspect_have_a_line_for_every_kind(place, run):
    code, out, err = run(f"compress model -o small --method modegpt --rank-multiple 2 --sparsity 0.3 {CALIBRATION}")
    assert code in (0, None), err
    assert_a_line_for_every_kind(out)
    code, out, err = run("inspect small")
    assert code in (0, None), err
    assert_a_line_for_every_kind(out)
    assert GUESSING in out
    card = (place / "small" / "README.md").read_text(encoding="utf-8")
    assert all(f"| perplexity, {kind} | " in card for kind in KINDS) and GUESSING in card
    record = json.loads((place / "small" / "rankfold.json").read_text(encoding="utf-8"))
    assert list(record["probe_texts"]["kinds"]) == list(KINDS) and record["run"]["seconds"]["probe_texts"] > 0


def test_compare_has_a_column_for_every_kind(place, run):
    pytest.importorskip("matplotlib", reason="rankfold[report] is not installed")
    line = f"compare model --methods modegpt:rank_multiple=2 --sparsities 0.3 {CALIBRATION} -o compared --text text.txt"
    code, out, err = run(f"{line} --text-length 32 --limit 2")
    assert code in (0, None), err
    header, _, dense, row, *below = (place / "compared" / "table.md").read_text(encoding="utf-8").splitlines()
    assert all(f"{kind} (probe), × dense" in header for kind in KINDS)
    assert header.count("|") == dense.count("|") == row.count("|") and row.count(" ± ") == len(KINDS)
    assert "probe" not in out.split("report.html")[0] and err.count(" probe text") == len(KINDS)
    assert "guesses [1]" in dense and any(line.startswith("[1] ") and GUESSING in line for line in below)


def test_evaluate_warns_of_guessing(run, caplog):
    code, out, _ = run("evaluate model --text text.txt --max-length 64 --limit 2 --device cpu --json")
    assert code in (0, None) and GUESSING in json.loads(out)["warning"] and GUESSING in caplog.text


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-16", "utf-32"])
def test_a_text_in_another_encoding_is_refused(place, run, encoding):
    (place / "wide.txt").write_bytes("plain letters\n".encode(encoding) * 50)
    code, _, err = run("evaluate model --text wide.txt --max-length 64 --device cpu")
    assert code == 2 and "wide.txt is UTF-16 or UTF-32, or no text" in err and "convert it to UTF-8" in err


@pytest.mark.parametrize(
    ("method", "reason"),
    [("shortgpt", "whole blocks are removed, and the smallest of these is"), ("slicegpt", "all blocks have one width")],
)
def test_more_that_is_removed_than_was_asked_for_has_a_reason(place, run, monkeypatch, method, reason):
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it, and lines would be wrapped
    code, out, err = run(f"compress model -o {method} --method {method} --sparsity 0.001 {CALIBRATION}")
    assert code in (0, None), err
    sparsity = json.loads((place / method / "rankfold.json").read_text())["counts"]["sparsity"]
    said = f"{sparsity:.1%} is removed, more than the 0.1% asked for"
    assert f"{said}: {reason}" in out and f"{said}: {reason}" in err
    code, out, _ = run(f"inspect {method}")
    assert f"{said}: {reason}" in out
    code, out, _ = run(f"compress model --dry-run --method modegpt --rank-multiple 1 --sparsity 0.3 {CALIBRATION}")
    assert "asked for" not in out
