"""A protocol as its authors publish it: their sums, our departures from it, and what a run by it says."""

import pytest
import typer

pytest.importorskip("matplotlib", reason="rankfold[report] is not installed")

import rankfold
from rankfold.cli.app import app
from rankfold.cli.forms import parse_forms
from rankfold.comparison import Accuracies, Generations, Measures, Perplexities, cells_of, compare
from rankfold.comparison.folder import CONFIG, read_config
from rankfold.comparison.protocol import Rules, protocol_lines, read_protocol
from rankfold.errors import OptionError
from rankfold.evaluation.tasks import Questions
from rankfold.evaluation.text import Texts
from rankfold.evaluation.writing import WRITTEN, Writing
from saved import save_text, save_tiny

ARENA = read_protocol("lowrankarena")
SEVEN = ARENA.means["MCQ mean"]
# Rows of the table of Llama-1-7B in the README of Zishan-Shao/lowrankarena, commit 04ce4b6: the two perplexities, the
# seven tasks, MathQA and MMLU math, and what it sums them up to.
PUBLISHED = {
    "dense": (5.67, 7.20, (0.737, 0.726, 0.445, 0.693, 0.786, 0.749, 0.408), 0.261, 0.278, 1.0),
    "asvd": (8.60, 11.04, (0.743, 0.628, 0.388, 0.669, 0.750, 0.696, 0.392), 0.241, 0.211, 0.787),
    "svd-llm": (7.88, 16.42, (0.633, 0.481, 0.317, 0.584, 0.681, 0.477, 0.332), 0.224, 0.291, 0.767),
    "modegpt": (6.92, 10.87, (0.647, 0.587, 0.353, 0.637, 0.724, 0.582, 0.336), 0.254, 0.304, 0.880),
}


def row(wikitext: float, c4: float, seven, mathqa: float | None, mmlu: float, _=None) -> dict:
    tasks = {name: {"acc": 0.0, "acc_norm": value} for name, value in zip(SEVEN, seven, strict=True)}
    tasks |= {"boolq": {"acc": seven[0]}, "winogrande": {"acc": seven[3]}, "mmlu_math": {"acc": mmlu}}
    tasks |= {} if mathqa is None else {"mathqa": {"acc": 0.0, "acc_norm": mathqa}}
    texts = [{"text": "wikitext2", "perplexity": wikitext}, {"text": "c4", "perplexity": c4}]
    return {"measures": {"texts": texts, "tasks": tasks}, "counts": {"parameters": 100}}


def test_the_retention_is_the_one_its_authors_publish():
    dense = row(*PUBLISHED["dense"])
    for name, published in PUBLISHED.items():
        found = ARENA.retention(row(*published), dense)
        assert found["retention"] == pytest.approx(published[-1], abs=1.5e-3), name
        assert len(found["terms"]) == ARENA.terms == 5


def test_a_term_without_any_task_is_left_out_and_a_mean_takes_what_there_is():
    dense, small = (row(*numbers[:3], None, numbers[4]) for numbers in (PUBLISHED["dense"], PUBLISHED["asvd"]))
    found = ARENA.retention(small, dense)
    assert set(found["terms"]) == {"wikitext2", "c4", "MCQ mean", "MMLU math"}
    assert found["retention"] == pytest.approx(
        (5.67 / 8.60 + 7.20 / 11.04 + 0.609 / 0.649 + 0.211 / 0.278) / 4, abs=1e-3
    )
    del small["measures"]["tasks"]["piqa"]
    means = ARENA.retention(small, dense)["means"]
    assert means == {"MCQ mean": pytest.approx((0.743 + 0.628 + 0.388 + 0.669 + 0.696 + 0.392) / 6)}


def test_a_task_of_which_the_dense_model_has_none_right_counts_in_the_mean():
    """It stands in the table, whose mean was of the others."""
    dense, small = row(10.0, 10.0, (0.0, *[0.7] * 6), 0.0, 0.5), row(10.0, 10.0, (0.35, *[0.35] * 6), 0.2, 0.5)
    found = ARENA.retention(small, dense)
    assert found["means"]["MCQ mean"] == pytest.approx(0.35)
    assert found["terms"] == pytest.approx({"wikitext2": 1, "c4": 1, "MCQ mean": 0.35 / 0.6, "MMLU math": 1})
    assert ARENA.retention(dense, dense)["means"]["MCQ mean"] == pytest.approx(0.6)


def described(**changes) -> tuple[dict, dict]:
    calibration = {"source": "wikitext2", "num_samples": 256, "max_length": 2048}
    texts = [{"text": name, "length": 2048, "limit": limit} for name, limit in (("wikitext2", None), ("c4", 128))]
    tasks = {"tasks": ARENA.settings()["tasks"].split(","), "limit": None}
    found = {"calibration": calibration, "texts": texts, "tasks": tasks} | changes
    return found["calibration"], {"texts": found["texts"], "tasks": found["tasks"]}


def test_every_departure_is_named_and_nothing_else():
    assert ARENA.departures(*described()) == []
    _, measures = described()
    short = measures["tasks"] | {"tasks": [name for name in measures["tasks"]["tasks"] if name != "mathqa"]}
    assert ARENA.departures(*described(tasks=short), ["mathqa"]) == []  # asked for, and not to be had
    assert "tasks arc_challenge" in ARENA.departures(*described(tasks=short))[0]
    few = described(calibration={"source": "a.txt", "num_samples": 8, "max_length": 512})
    assert ARENA.departures(*few) == [
        "calibration text a.txt in place of wikitext2",
        "calibration samples 8 in place of 256",
        "tokens of a sample 512 in place of 2048",
    ]
    texts = [{"text": "c4", "length": 128, "limit": 4}]
    assert ARENA.departures(*described(texts=texts, tasks=measures["tasks"] | {"limit": 4})) == [
        "texts c4 in place of wikitext2, c4",
        "tokens of an evaluation sample 128 in place of 2048",
        "samples of c4 4 in place of 128",
        "questions of a task 4 in place of all",
    ]
    turned = [{"text": name, "length": 2048, "limit": limit} for name, limit in (("c4", 128), ("wikitext2", 9))]
    assert ARENA.departures(*described(texts=turned))[1:] == ["samples of wikitext2 9 in place of all"]


def parsed(*line: str) -> dict:
    return typer.main.get_command(app).commands["compare"].make_context("compare", ["model", "-o", "out", *line]).params


def test_its_options_are_defaults_and_those_given_go_before_them():
    found = parsed("--protocol", "lowrankarena", "--num-samples", "8")
    assert (found["num_samples"], found["max_length"], found["sparsities"]) == (8, 2048, "0.2,0.4")
    assert found["tasks"].endswith(",mathqa,mmlu_math:5") and found["text"] == ["wikitext2", "c4"]
    assert parsed("--methods", "svd", "--sparsities", "0.3", "--text", "a")["protocol"] is None
    with pytest.raises(OptionError, match="unknown protocol 'lowrankarenas'; did you mean 'lowrankarena'"):
        parsed("--protocol", "lowrankarenas")


def test_what_would_make_the_sizes_others_is_refused():
    ARENA.check([0.4], [{"selection": "leverage", "modules": ("mlp", "vo")}, {}])
    with pytest.raises(OptionError, match=r"keeps 0\.8, 0\.6 of the model, so sparsities takes 0\.2, 0\.4 .*got 0\.3"):
        ARENA.check([0.2, 0.3], [])
    for given in ({"scope": "blocks"}, {"budget": "bytes"}, {"modules": {"mlp": 0.2}}):
        (name,) = given
        with pytest.raises(OptionError, match=f"counts the parameters of the whole model, got {name}="):
            ARENA.check([0.2], [{}, given])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arena")
    save_tiny(folder / "model", blocks=2)
    save_text(folder / "text.txt")
    save_text(folder / "other.txt", copies=2)
    return folder


def test_where_last_words_are_read_is_in_the_record(place, tmp_path):
    """The command that repeats a comparison left them out, and said nothing."""
    (tmp_path / "lambada.jsonl").write_text('{"text": "one two"}\n')
    source = rankfold.open_model(place / "model", device="cpu")
    found = Generations(source, Writing(str(tmp_path), limit=1)).describe()
    assert found == {"limit": 1, "kinds": ["last word", "copying", "arithmetic"], "folder": tmp_path.name}
    assert "folder" not in Generations(source, Writing(limit=1)).describe()


def test_a_run_keeps_the_share_of_the_whole_model_and_says_what_it_left_out(place, tmp_path, monkeypatch):
    monkeypatch.setattr(
        Questions, "measure", lambda *_, **__: {"boolq": {"acc": 0.5}, "piqa": {"acc": 0.1, "acc_norm": 0.75}}
    )
    source = rankfold.open_model(place / "model", device="cpu")
    tokens = rankfold.load_calibration(str(place / "text.txt"), source, num_samples=4, max_length=32)
    names = [str(place / "text.txt"), str(place / "other.txt")]
    texts = Perplexities(source, Texts(names, 32, most={names[1]: 2}))
    assert [len(windows) for windows in texts.windows][1] == 2 < len(texts.windows[0])
    functions = {"texts": texts, "tasks": Accuracies(source, Questions(["boolq", "piqa"]))}
    functions["generation"] = Generations(source, Writing(limit=2))
    measures = Measures(functions, lambda: rankfold.load(place / "model", device="cpu"))
    cells = cells_of(parse_forms("svd:rank_multiple=1"), [0.2], {"scope": "model"})
    rules = Rules(ARENA, {"mathqa": "rows has no questions of mathqa"})
    dense, small = compare(source, cells, tokens, measures, tmp_path / "out", rules=rules)
    assert dense["protocol"]["retention"] == 1 and small["protocol"]["kept"] == pytest.approx(0.8, abs=0.01)
    terms = [
        before["perplexity"] / text["perplexity"]
        for before, text in zip(*(r["measures"]["texts"] for r in (dense, small)), strict=True)
    ]
    assert small["protocol"]["retention"] == pytest.approx((sum(terms) + 1) / 3)
    table = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert {"Q. Ret.", "62.5", "75.0"} <= {
        cell.strip(" *") for line in table.splitlines() for cell in line.split("|")
    }, table
    wrote, was = small["measures"]["generation"], dense["measures"]["generation"]
    assert was["equal"] == 1 and was["first_difference"] == WRITTEN and wrote["first_difference"] < WRITTEN
    assert f"{100 * wrote['equal']:.1f}" in table and "tokens as dense, %" in table and "copying (exact), %" in table
    lines = protocol_lines(read_config(tmp_path / "out" / CONFIG)["identity"]["protocol"])
    assert (
        lines[0].startswith("Not by the protocol LowRankArena") and "calibration samples 4 in place of 256" in lines[0]
    )
    assert lines[1] == "Left out: mathqa, because rows has no questions of mathqa."
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert all(line in table for line in lines) and "because rows has no questions of mathqa" in page
