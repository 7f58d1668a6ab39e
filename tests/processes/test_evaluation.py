"""Evaluations that several processes share: the numbers of one, printed once, and an error of one is that of all."""

import json
import tempfile
from pathlib import Path

import pytest

from saved import save_text, save_tiny
from shared_runs import run
from warm import RANKFOLD

# No process computes all of it alone, and nothing else is different.
COUNTS = """
import sys
from rankfold.evaluation import perplexity
sums = perplexity._sum
counted = []

def count(losses):
    counted.append(losses.numel())
    return sums(losses)

perplexity._sum = count
from rankfold.cli import main
try:
    main()
finally:
    print(sum(counted), file=sys.stderr)
"""
FAILS = """
import os
from rankfold import errors
from rankfold.evaluation import tasks

if os.environ["RANK"] == "1":
    def fail(*inputs):
        raise errors.NumericsError("the second process fails")
    tasks.math.isfinite = fail
from rankfold.cli import main
main()
"""
LENGTH = 1024  # four windows in a batch


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluations")
    save_tiny(folder / "model", blocks=2, max_position_embeddings=LENGTH)
    save_text(folder / "text.txt")
    words = ["a", "the", "no", "every", "some", "any", "one"]
    row = {"sol1": "an object", "sol2": "an integer and a class"}
    rows = [row | {"goal": f"{word} class", "label": i % 2} for i, word in enumerate(words)]
    (folder / "piqa_val.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = [{"text": f"{word} class is an object of {word} class"} for word in words]
    (folder / "lambada_test.jsonl").write_text("\n".join(map(json.dumps, text)))
    return folder


def evaluated(place: Path, count: int, *options: str, code: str = RANKFOLD) -> tuple[dict, str]:
    line = ["evaluate", str(place / "model"), *options, "--device", "cpu", "--json"]
    codes, out, err = run(count, code, *line, folder=Path(tempfile.mkdtemp(dir=place)))
    assert codes == [0] * count, err
    return json.loads(out), err  # of one process: several objects are no JSON


@pytest.mark.parametrize("stream", [(), ("--stream",)], ids=["whole", "streamed"])
def test_processes_share_the_windows_of_a_text_and_find_the_very_number_of_one(place, stream):
    options = ("--text", str(place / "text.txt"), "--max-length", str(LENGTH), *stream)
    (one, _), (two, err) = (evaluated(place, count, *options, code=COUNTS) for count in (1, 2))
    assert one["windows"] > 4 and one["tokens"] == one["windows"] * (LENGTH - 1)
    keys = ("perplexity", "nll", "windows", "tokens")
    assert [one[key] for key in keys] == [two[key] for key in keys]
    shares = [int(line) for line in err.splitlines() if line.isdecimal()]
    assert len(shares) == 2 and sum(shares) == one["tokens"] and all(shares)


def test_more_processes_than_batches_leave_some_without_work(place):
    options = ("--text", str(place / "text.txt"), "--max-length", "64", "--limit", "1", "--stream")
    one, three = (evaluated(place, count, *options)[0] for count in (1, 3))
    assert one["perplexity"] == three["perplexity"]


@pytest.mark.parametrize("limit", ["5", "1"])  # shared unevenly; fewer questions than processes
def test_processes_share_questions(place, limit):
    options = ("--tasks", "piqa,lambada_openai", "--include-path", str(place), "--limit", limit)
    one, two = (evaluated(place, count, *options)[0]["tasks"] for count in (1, 2))
    assert one.keys() == two.keys() == {"piqa", "lambada_openai"}
    for name, facts in one.items():
        # Other questions stand in a batch, so the last digits of a likelihood may differ.
        for key, value in facts.items():
            assert two[name][key] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), key
        assert two[name]["samples"] == int(limit)


def test_prompts_that_are_cut_are_counted_once(place):
    long = [{"text": "a class"}, {"text": "class object " * 2000 + "integer"}, {"text": "the class is an object"}]
    (place / "long").mkdir()
    (place / "long" / "lambada_test.jsonl").write_text("\n".join(map(json.dumps, long)))
    options = ("--tasks", "lambada_openai", "--include-path", str(place / "long"))
    one, two = (evaluated(place, count, *options)[0]["tasks"]["lambada_openai"] for count in (1, 2))
    assert one["truncated"] == two["truncated"] == 1


def test_what_is_not_shared_is_printed_once(place):
    options = ("--text", str(place / "text.txt"), "--max-length", "64", "--limit", "2", "--generation")
    one, two = (evaluated(place, count, *options)[0] for count in (1, 2))
    assert two["generation"] == one["generation"]


def test_an_error_of_one_process_is_one_line_and_the_exit_code_of_all(place):
    line = ["evaluate", str(place / "model"), "--tasks", "piqa", "--include-path", str(place), "--device", "cpu"]
    codes, _, err = run(2, FAILS, *line, folder=place / "fails")
    assert codes == [2, 2]
    assert [text for text in err.splitlines() if text.startswith("rankfold: ")] == [
        "rankfold: the second process fails"
    ]


def test_processes_share_what_a_comparison_measures(place):
    def compared(count: int) -> list[dict]:
        output = place / f"compared-{count}"
        line = ["compare", str(place / "model"), "-o", str(output), "--methods", "modegpt:rank_multiple=2"]
        line += ["--sparsities", "0.3", "--calibration", str(place / "text.txt"), "--num-samples", "8"]
        line += ["--max-length", "32", "--shards", "2", "--text", str(place / "text.txt"), "--text-length", str(LENGTH)]
        line += ["--tasks", "piqa", "--include-path", str(place), "--generation", "--device", "cpu"]
        codes, _, err = run(count, COUNTS, *line, folder=place / f"compares-{count}")
        assert codes == [0] * count, err
        shares.append([int(text) for text in err.splitlines() if text.isdecimal()])
        return [json.loads(row) for row in (output / "results.jsonl").read_text().splitlines()]

    shares: list[list[int]] = []
    one, two = (compared(count) for count in (1, 2))
    assert len(one) == len(two) == 2 and sum(shares[0]) == sum(shares[1]) and all(shares[1])
    for alone, together in zip(one, two, strict=True):
        assert alone["status"] == together["status"] == "done"
        for mine, theirs in zip(alone["measures"]["texts"], together["measures"]["texts"], strict=True):
            assert mine["perplexity"] == theirs["perplexity"]
        assert together["measures"]["generation"] == alone["measures"]["generation"]
        assert together["measures"]["tasks"]["piqa"]["acc"] == alone["measures"]["tasks"]["piqa"]["acc"]
