"""A grid on a tiny model: what is in the rows, what is shared, what is kept, and what fails."""

import importlib
import json
import shutil

import pytest

pytest.importorskip("matplotlib", reason="rankfold[report] is not installed")

import rankfold
from rankfold import perplexity, pipeline
from rankfold.cli.forms import parse_forms
from rankfold.comparison import Accuracies, Measures, Perplexities, Speed, cells_of, compare
from rankfold.errors import CheckpointError, DataError, OptionError
from rankfold.evaluation.tasks import Questions
from rankfold.evaluation.text import Texts
from saved import save_text, save_tiny
from undrawn import draw_only

module = importlib.import_module("rankfold.comparison.compare")
METHODS = "modegpt:rank_multiple=2,latentllm,rankfold:rank_multiple=2"
TIMES = ("compress_seconds", "measure_seconds", "environment")


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch):
    draw_only(monkeypatch)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    save_tiny(folder / "model", blocks=2)
    save_text(folder / "text.txt")
    save_text(folder / "other.txt", copies=2)
    return folder


@pytest.fixture(scope="module")
def source(place):
    return rankfold.open_model(place / "model", device="cpu")


@pytest.fixture(scope="module")
def tokens(place, source):
    return rankfold.load_calibration(str(place / "text.txt"), source, num_samples=4, max_length=32)


@pytest.fixture(scope="module")
def measures(place, source):
    return made(place, source)


def made(place, source, length: int = 32, **more) -> Measures:
    texts = Perplexities(source, Texts([str(place / "other.txt"), str(place / "text.txt")], length, 3))
    return Measures({"texts": texts, **more}, lambda: rankfold.load(place / "model", device="cpu"))


@pytest.fixture(scope="module")
def finished(place, source, tokens, measures, tmp_path_factory):
    """Folder and rows of a whole grid, and how often the dense model was calibrated."""
    out, calls = tmp_path_factory.mktemp("done") / "out", []
    with pytest.MonkeyPatch.context() as patch:
        draw_only(patch)
        calibrate = pipeline.calibrate
        patch.setattr(pipeline, "calibrate", lambda *args, **options: (calls.append(1), calibrate(*args, **options))[1])
        rows = compare(source, cells_of(parse_forms(METHODS), [0.2, 0.4]), tokens, measures, out)
    return out, rows, len(calls)


def plain(rows: list[dict]) -> str:
    """Without times."""
    rows = json.loads(json.dumps(rows))
    for row in rows:
        for name in TIMES:
            row.pop(name, None)
        for text in (row["measures"] or {}).get("texts", []):
            del text["tokens_per_second"]
    return json.dumps(rows)


def test_a_row_has_the_numbers_of_its_compression_run_alone(source, tokens, measures, finished):
    _, rows, _ = finished
    windows = measures.functions["texts"].windows
    assert [row["label"] for row in rows] == ["dense", *(f.label for f in parse_forms(METHODS) for _ in range(2))]
    assert [row["measures"]["texts"][1]["text"] for row in rows] == ["text.txt"] * 7
    for row, (name, mode) in {2: ("modegpt", "one-pass"), 6: ("rankfold", "sequential")}.items():
        method = rankfold.make_method(name, sparsity=0.4, rank_multiple=2)
        model = rankfold.compress(source, method=method, calibration=tokens, mode=mode).model
        alone = [perplexity(model, some)["perplexity"] for some in windows]
        assert [text["perplexity"] for text in rows[row]["measures"]["texts"]] == pytest.approx(alone, rel=1e-6)
        assert rows[row]["counts"]["parameters"] == sum(p.numel() for p in model.parameters())
        assert rows[row]["mode"] == mode
    dense = source.whole_model()
    alone = [perplexity(rankfold.load(measures.load_dense().name_or_path), some)["perplexity"] for some in windows]
    assert [text["perplexity"] for text in rows[0]["measures"]["texts"]] == pytest.approx(alone, rel=1e-6)
    assert rows[0]["counts"]["parameters"] == sum(p.numel() for p in dense.parameters())


def test_the_dense_model_is_calibrated_once_and_nothing_large_is_left(finished):
    out, rows, calls = finished
    assert calls == 1 and {row["moments"] for row in rows[1:5]} == {"shared"} and rows[5]["moments"] == "own"
    assert all(path.suffix == ".json" for path in (out / "cells").iterdir())
    names = {path.name for path in out.iterdir()}
    assert names == {"cells", "compare.json", "plots", "report.html", "results.jsonl", "table.md"}
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines == rows


def test_modules_have_ranks_and_held_out_errors(finished):
    for row in finished[1][1:]:
        removed = sum(module["dense_weights"] - module["weights"] for module in row["modules"])
        assert removed == row["counts"]["removed_weights"]
        assert {module["block"] for module in row["modules"]} == {0, 1}
        assert any(module["held_out_error"] is not None for module in row["modules"])


def test_a_grid_that_is_interrupted_again_and_again_goes_on_where_it_was(
    source, tokens, measures, finished, tmp_path, monkeypatch
):
    """After the dense row, in the middle, and before the last row."""
    cells, seen, compressed, done = cells_of(parse_forms(METHODS), [0.2, 0.4]), [], [], pipeline.compress
    monkeypatch.setattr(
        pipeline, "compress", lambda *args, **options: (compressed.append(args[1]), done(*args, **options))[1]
    )

    def interrupt(row):
        seen.append(row["label"])
        if len(seen) in (1, 3, 6):
            raise KeyboardInterrupt

    for rows in (1, 3, 6):
        with pytest.raises(KeyboardInterrupt):
            compare(source, cells, tokens, measures, tmp_path / "out", on_row=interrupt)
        assert (len(seen), len(compressed)) == (rows, rows - 1)  # the dense row was the first
    assert plain(compare(source, cells, tokens, measures, tmp_path / "out")) == plain(finished[1])
    assert len(compressed) == len(cells)


def test_a_model_that_was_compressed_but_not_measured_is_not_compressed_again(
    source, tokens, measures, tmp_path, monkeypatch
):
    cells = cells_of(parse_forms("modegpt:rank_multiple=2"), [0.2])
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(module, "read_record", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        compare(source, cells, tokens, measures, tmp_path / "out")
    monkeypatch.setattr(pipeline, "compress", None)  # a call would be an error that is no row
    assert compare(source, cells, tokens, measures, tmp_path / "out")[1]["status"] == "done"


def test_what_one_cell_cannot_do_is_a_row_and_the_others_go_on(source, tokens, measures, tmp_path):
    cells = cells_of(
        parse_forms("modegpt:rank_multiple=2,modegpt:rank_multiple=2,exclude_blocks=0+1,latentllm:joint=ud"), [0.2]
    )
    rows = compare(source, cells, tokens, measures, tmp_path / "out", keep=True)
    assert [row["status"] for row in rows] == ["done", "done", "failed", "failed"]
    assert "no module is left to compress" in rows[2]["error"] or "sparsity" in rows[2]["error"]
    assert "cannot take the joint form 'ud'" in rows[3]["error"]
    assert rankfold.load(tmp_path / "out" / "cells" / cells[0].key)  # kept
    assert "failed" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_a_failure_in_the_middle_is_tried_again(source, tokens, measures, tmp_path, monkeypatch):
    cells = cells_of(parse_forms("modegpt:rank_multiple=2,latentllm"), [0.2])
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "compress", lambda *args, **options: (_ for _ in ()).throw(MemoryError()))
        rows = compare(source, cells, tokens, measures, tmp_path / "out")
    assert [row["error"] for row in rows] == [None, "out of memory", "out of memory"]
    assert [row["status"] for row in compare(source, cells, tokens, measures, tmp_path / "out")] == ["done"] * 3


def test_where_no_cell_can_be_done_that_is_an_error_and_nothing_is_written(source, tokens, measures, tmp_path):
    with pytest.raises(rankfold.RankfoldError, match="cannot take the joint form"):
        compare(source, cells_of(parse_forms("latentllm:joint=ud"), [0.2, 0.3]), tokens, measures, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_takes_further_cells_and_keeps_its_own(source, tokens, measures, finished, tmp_path, monkeypatch):
    shutil.copytree(finished[0], tmp_path / "out")
    cells = cells_of(parse_forms("svd"), [0.4])
    rows = compare(source, cells, tokens, measures, tmp_path / "out")
    assert [row["label"] for row in rows] == ["dense", "svd"]
    lines = (tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["label"] for line in lines] == [*(row["label"] for row in finished[1]), "svd"]
    assert (tmp_path / "out" / "report.html").read_text(encoding="utf-8").count(
        "rankfold compare --config out/compare.json"
    ) == 1


def test_what_an_earlier_command_kept_stays(source, tokens, measures, tmp_path, caplog):
    one, two = cells_of(parse_forms("modegpt:rank_multiple=2,latentllm"), [0.2])
    place = tmp_path / "out"
    compare(source, [one], tokens, measures, place, keep=True)
    kept = {path.name for path in (place / "cells").iterdir() if path.is_dir()}
    assert one.key in kept and any(name.startswith("moments-") for name in kept)
    compare(source, [one, two], tokens, measures, place)
    assert {path.name for path in (place / "cells").iterdir() if path.is_dir()} == kept
    assert "kept" not in caplog.text
    compare(source, [one, two], tokens, measures, place, keep=True)
    assert "no models were kept of 1 row done before" in caplog.text


def test_other_questions_are_another_comparison(place, source, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(Questions, "measure", lambda *_, **__: {"piqa": {"acc": 0.5}})
    rows = [{"goal": "a", "sol1": "b", "sol2": "c", "label": label} for label in (0, 1)]
    cells = cells_of(parse_forms("svd"), [0.4])
    for number, folder in enumerate((tmp_path / "one" / "rows", tmp_path / "two" / "rows")):
        folder.mkdir(parents=True)
        (folder / "piqa.jsonl").write_text(json.dumps(rows[number]) + "\n")
    first, second = (
        made(place, source, tasks=Accuracies(source, Questions(["piqa"], str(tmp_path / name / "rows"))))
        for name in ("one", "two")
    )
    compare(source, cells, tokens, first, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"\(it differs in: measures\)"):
        compare(source, cells, tokens, second, tmp_path / "out")


def test_another_comparison_is_refused(place, source, tokens, measures, finished):
    cells = cells_of(parse_forms("svd"), [0.4])
    with pytest.raises(CheckpointError, match=r"another model, text or setting; .*\(it differs in: measures\)"):
        compare(source, cells, tokens, made(place, source, length=16), finished[0])
    other = rankfold.load_calibration(str(place / "text.txt"), source, num_samples=4, max_length=16)
    with pytest.raises(CheckpointError, match=r"\(it differs in: calibration\)"):
        compare(source, cells, other, measures, finished[0])
    with pytest.raises(CheckpointError, match="exists and is not a comparison"):
        compare(source, cells, tokens, measures, place)


@pytest.mark.parametrize("damage", ["", "{}", '{"label": 1}', "[]", '{"label": NaN}'])
def test_a_damaged_row_is_named(source, tokens, measures, finished, tmp_path, damage):
    shutil.copytree(finished[0], tmp_path / "out")
    (tmp_path / "out" / "cells" / "dense.json").write_text(damage)
    with pytest.raises(CheckpointError, match="dense.json is"):
        compare(source, cells_of(parse_forms("svd"), [0.4]), tokens, measures, tmp_path / "out")


def test_speed_is_measured_beside_the_dense_model(place, source, tokens, tmp_path, monkeypatch):
    draw_only(monkeypatch, "speed-decode")
    speed = Speed(source.context_length, batch=1, repeats=1)
    cells = cells_of(parse_forms("modegpt:rank_multiple=2"), [0.4])
    rows = compare(source, cells, tokens, made(place, source, speed=speed), tmp_path / "out")
    assert rows[0]["measures"]["speed"]["prefill_ratio"] == 1
    found = rows[1]["measures"]["speed"]
    ratio = found["prefill_tokens_per_second"] / found["dense"]["prefill_tokens_per_second"]
    assert ratio != 1  # two measurements
    assert found["prefill_ratio"] == pytest.approx(ratio) and found["prompt"] + found["steps"] <= 128
    assert (tmp_path / "out" / "plots" / "speed-decode.png").read_bytes().startswith(b"\x89PNG")


def test_texts_that_are_too_short_or_named_twice_are_said_before_anything_runs(place, source):
    (place / "short.txt").write_text("few words")
    with pytest.raises(DataError, match=r"short.txt: the text has \d+ tokens.*smaller max_length"):
        Perplexities(source, Texts([str(place / "short.txt")], 64))
    for other in (place / "text.txt", f"{place}/./text.txt"):
        with pytest.raises(OptionError, match="more than once"):
            Perplexities(source, Texts([str(place / "text.txt"), str(other)], 64))


def test_texts_of_one_name_are_told_apart(place, source):
    (place / "below").mkdir()
    save_text(place / "below" / "text.txt")
    save_text(place / "below" / "more.txt")
    names = [str(place / "text.txt"), str(place / "below" / "text.txt")]
    measure = Perplexities(source, Texts([*names, names[1].replace("text.txt", "more.txt")], 32))
    assert measure.labels == [f"{place.name}/text.txt", "below/text.txt", "more.txt"]


def test_the_text_that_was_calibrated_on_is_named(finished, source, tokens, measures, caplog):
    compare(source, cells_of(parse_forms(METHODS), [0.2, 0.4]), tokens, measures, finished[0])
    assert "text.txt is the calibration text too" in caplog.text and "other.txt" not in caplog.text
    for page in ("table.md", "report.html"):  # which others are shown
        text = (finished[0] / page).read_text()
        assert text.count("text.txt is the calibration text too; its perplexities are too good") == 1, page


def test_tasks_are_in_the_rows_and_in_the_command_that_repeats_them(place, source, tokens, tmp_path, monkeypatch):
    draw_only(monkeypatch, "tasks-0.4")
    asked = []

    def measure(self, network, tokenizer, processor):
        asked.append((sum(p.numel() for p in network.parameters()), tokenizer, self.folder, self.limit))
        return {task: {"acc": 0.25 * (i + 1), "acc_stderr": 0.05, "acc_norm": 0.1} for i, task in enumerate(self.tasks)}

    monkeypatch.setattr(Questions, "measure", measure)
    monkeypatch.setattr(Questions, "check", lambda self: None)
    monkeypatch.setattr(Questions, "digest", lambda self: "of no rows")
    tasks = Accuracies(source, Questions(["piqa", "copa", "boolq"], str(place), 7))
    rows = compare(
        source, cells_of(parse_forms("svd"), [0.4]), tokens, made(place, source, tasks=tasks), tmp_path / "out"
    )
    assert asked == [(row["counts"]["parameters"], source.tokenizer, str(place), 7) for row in rows]
    table = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert all(table.count(f"{100 * value:.1f} ± 5.0") == 2 for value in (0.25, 0.5, 0.75))
    assert "</svg>" in (tmp_path / "out" / "plots" / "tasks-0.4.svg").read_text(encoding="utf-8")
    assert str(place) not in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    identity = json.loads((tmp_path / "out" / "compare.json").read_text(encoding="utf-8"))["identity"]
    assert identity["measures"]["tasks"]["folder"] == place.name


def test_methods_that_remove_blocks_have_rows_too(source, tokens, measures, tmp_path):
    """They have no uniform allocation to be checked by, and a greedy search takes text where others share moments."""
    rows = compare(source, cells_of(parse_forms("shortgpt,sleb"), [0.3]), tokens, measures, tmp_path / "out")
    assert [row["status"] for row in rows] == ["done"] * 3
    assert [row["moments"] for row in rows[1:]] == ["shared", "own"]
    assert all(row["counts"]["sparsity"] == pytest.approx(0.5) for row in rows[1:])  # one of two blocks
    told = "50.0% is removed, more than the 30.0% asked for: whole blocks are removed"
    for page in ("table.md", "report.html"):
        text = (tmp_path / "out" / page).read_text(encoding="utf-8")
        assert told in text and text.count("removes more [") == 2


def test_of_masked_models_the_table_says_that_nothing_gets_smaller(source, tokens, measures, tmp_path):
    rows = compare(source, cells_of(parse_forms("wanda"), [0.3, 0.5]), tokens, measures, tmp_path / "out")
    assert [row["status"] for row in rows] == ["done", "failed", "done"]
    dense, _, masked = (row["counts"] for row in rows)
    assert (
        masked["sparsity"] == 0.5 and masked["bytes"] == dense["bytes"] and masked["parameters"] == dense["parameters"]
    )
    table = (tmp_path / "out" / "table.md").read_text()
    assert "its sparsity is 0.5, got 0.3" in table and "what is removed stays as zeros" in table
