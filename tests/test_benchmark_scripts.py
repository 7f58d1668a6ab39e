"""The scripts in benchmarks/ take hours: their imports are there, experiments can run, and records give their pages."""

import ast
import importlib
import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

import rankfold
from families import ANY_MODEL
from rankfold.methods import make_method
from saved import save_text, save_tiny

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = sorted([*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("pages/*.py"), *BENCHMARKS.glob("accelerator/*.py")])
EXPERIMENTS = sorted(BENCHMARKS.glob("experiments/*.yaml"))
DOCS = BENCHMARKS.parent / "docs" / "results"
TINY = """
page: perplexity
model: {model}
calibration: {{text: text.txt, samples: 4, length: 32, seed: 0}}
evaluation: {{text: other.txt, every: 2, first: 3}}
sparsities: [0.3]
settings:
- name: [modegpt rank_multiple=2, svd-llm]
- {{name: modegpt rank_multiple=2, setting: "{{module}} only", vary: {{module: {{mlp: {{modules: [mlp]}}}}}}}}
definitions: {{perplexity: }}
"""


@pytest.fixture(scope="module", autouse=True)
def importable():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_everything_a_script_imports_from_rankfold_is_there(path):
    missing = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rankfold":
            module = importlib.import_module(node.module)
            missing += [
                f"{node.module}.{name.name}"
                for name in node.names
                if not hasattr(module, name.name) and not _is_module(node.module, name.name)
            ]
    assert not missing


def _is_module(package: str, name: str) -> bool:
    return importlib.util.find_spec(f"{package}.{name}") is not None


def test_scripts_and_experiments_are_found():
    assert {"render", "run", "costs"} <= {path.stem for path in SCRIPTS}
    assert {"perplexity_smollm2", "domains"} <= {path.stem for path in EXPERIMENTS}


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_names_methods_that_exist_and_every_row_of_its_record(path):
    experiment = importlib.import_module("experiment")
    found = list(experiment.rows(experiment.read(path.stem)))
    for row in found:
        make_method(row.method, **row.options)
    names = [row.name for row in found]
    assert len(names) == len(set(names))
    record = BENCHMARKS / "results" / path.with_suffix(".json").name
    if record.exists():
        measured = {row["name"] for row in json.loads(record.read_text(encoding="utf-8"))["rows"]}
        assert measured <= {"dense", *names}


def test_the_grid_has_every_method():
    experiment = importlib.import_module("experiment")
    assert {row.method for row in experiment.rows(experiment.read("grid_smollm2"))} == {*ANY_MODEL}


def test_records_give_the_pages_that_are_there():
    pytest.importorskip("matplotlib", reason="rankfold[report] is not installed")
    pages = importlib.import_module("render").pages(BENCHMARKS / "results")
    others = ("index", "robustness")
    written = {path.stem: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md") if path.stem not in others}
    assert pages.keys() == written.keys()
    assert [name for name in pages if pages[name] != written[name]] == []


def test_a_file_is_on_the_page_of_bytes_if_no_other_one_beats_it():
    best = importlib.import_module("pages.same_bytes").best
    sizes = {
        "a": (9, 20.0, 5),
        "b": (5, 20.0, 4),
        "c": (4, 22.0, 4),
        "d": (4, 21.0, 3),
        "e": (6, 30.0, 9),
        "f": (1, 40.0, 1),
    }
    rows = [
        {"name": name, "bytes": size, "perplexity": {"text": loss}, "decode": speed}
        for name, (size, loss, speed) in sizes.items()
    ]

    def beaten(name: str, sign: int, what: str) -> bool:
        one = next(row for row in rows if row["name"] == name)
        return any(
            other["perplexity"]["text"] <= one["perplexity"]["text"]
            and sign * other[what] <= sign * one[what]
            and (other["perplexity"]["text"], other[what]) != (one["perplexity"]["text"], one[what])
            for other in rows
        )

    for what, sign, expected in (("bytes", 1, ["b", "d", "f"]), ("decode", -1, ["a", "e"])):
        assert best(rows, what, "text") == expected == [name for name in sizes if not beaten(name, sign, what)]


@pytest.mark.parametrize(
    ("quartiles", "said"), [([1.01, 1.3], "no draft, by the lower quartile of rounds: x."), ([0.9, 1.2], "not pay")]
)
def test_a_draft_pays_if_it_is_faster_in_three_of_four_rounds(quartiles, said):
    """In two of them, which a median above 1 would be, is not enough."""
    row = {"parameters": 1e6, "tokens per forward": 1.0, "tokens/s": 9.0, "same": 2, "prompts": 2}
    rows = [
        row | {"name": "none", "ratio": 1.0, "ratio quartiles": [1.0, 1.0]},
        row | {"name": "x", "ratio": 1.1, "ratio quartiles": quartiles, "accepted": 0.5},
    ]
    window = {"samples": 2, "length": 8, "source": "text.txt"}
    config = {"calibration": window, "prompts": window, "tokens": 4, "rounds": 3}
    lines = importlib.import_module("pages.costs").draft({"config": config, "rows": rows})
    assert said in lines[4] and "| x | 1.0 M | 50% |" in lines[-1]


def test_the_tables_of_readme_and_results_are_what_the_records_say():
    readme = importlib.import_module("pages.readme")
    for path, lines in (
        (BENCHMARKS.parent / "README.md", readme.short(BENCHMARKS / "results")),
        (DOCS / "index.md", readme.table(BENCHMARKS / "results")),
    ):
        assert "\n\n" + "\n".join(lines) + "\n\n" in path.read_text(encoding="utf-8")
    example = "\n\n" + "\n".join(readme.example(BENCHMARKS / "results")) + "\n\n"
    for path in (BENCHMARKS.parent / "README.md", DOCS.parent / "index.md"):
        assert example in path.read_text(encoding="utf-8")
    assert (DOCS / "index.md").read_text(encoding="utf-8").endswith("\n".join([readme.LIST, "", *readme.listed(DOCS)]))


def test_every_page_of_results_begins_with_a_question():
    render, questions = importlib.import_module("render"), importlib.import_module("pages.summaries").QUESTIONS
    asked = [page for pages in questions.values() for page in pages]
    assert sorted(asked) == sorted([*render.PAGES, *render.TOGETHER, "robustness"])


def test_a_page_of_results_answers_its_question_by_the_record():
    summary = importlib.import_module("pages.summaries").summary
    names = {"dense": 10.0, "rankfold 0.3": 12.0, "modegpt 0.3": 13.0, "latentllm (joint) 0.3": 2345.0, "other": 1.0}
    rows = [{"name": name, "perplexity": value} for name, value in names.items()]
    records = [{"config": {"model": {"name": name}}, "rows": rows} for name in ("another", "SmolLM2")]
    records[0] = records[0] | {"rows": []}
    said = "At 0.3 SmolLM2 goes from 10.00 to 12.00 by the default, 13.00 by `modegpt` and 2,345 by `latentllm`."
    assert said in summary("perplexity", records)[0]
    kept = [({"a": 0.5, "b": None}, {"a": 0.6, "b": None}), ({"a": 0.9}, {"a": 0.6})]
    gates = [{"name": f"m {i}", "kept": some, "least": least} for i, (some, least) in enumerate(kept)]
    gates += [{"name": "failed", "error": "out of memory", "least": {"a": 0.1}}]
    said = "1 of 3 gates hold. Not held: m 0, a 0.500 (wanted 0.6); failed, a 0.000 (wanted 0.1)."
    assert said in summary("gates", [{"rows": gates}])[0]


def test_the_picture_of_the_readme_shows_the_record():
    readme = importlib.import_module("pages.readme")
    found = readme.rows(BENCHMARKS / "results", "tradeoff_smollm2")
    for setting in readme.DRAWN:
        sparsities, perplexities, speeds = readme.curve(found, setting)
        assert sparsities == [0.0, 0.2, 0.3, 0.4] and speeds[0] == 1
        assert perplexities[2] == next(iter(found[f"{setting} 0.3"]["perplexity"].values()))
        assert speeds[2] == found[f"{setting} 0.3"]["speed"]["prefill_ratio"]


def test_the_first_page_of_the_results_links_all_others():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert [path.name for path in DOCS.glob("*.md") if path.stem != "index" and f"]({path.name})" not in index] == []


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiment")
    save_tiny(folder / "model", blocks=2)
    save_text(folder / "text.txt")
    save_text(folder / "other.txt", copies=2)
    (folder / "tiny.yaml").write_text(TINY.format(model=folder / "model"))
    return folder


def ran(place: Path, monkeypatch, *arguments: str) -> dict:
    """The record, after one run of the experiment."""
    out = place / "out.json"
    monkeypatch.setattr(
        sys, "argv", ["run.py", str(place / "tiny.yaml"), "--data", str(place), "--json", str(out), *arguments]
    )
    importlib.import_module("run").main()
    return json.loads(out.read_text(encoding="utf-8"))


def test_an_experiment_is_run_row_by_row_and_goes_on(place, monkeypatch):
    """Numbers are those of the same steps by hand; a second run adds only rows that were left out."""
    first = ran(place, monkeypatch, "--only", "dense", "modegpt rank_multiple=2")
    assert [row["name"] for row in first["rows"]] == ["dense", "modegpt rank_multiple=2 0.3"]
    source = rankfold.open_model(place / "model", device="cpu")
    tokens = rankfold.load_calibration(str(place / "text.txt"), source, num_samples=4, max_length=32)
    model = rankfold.compress(
        source, method=make_method("modegpt", sparsity=0.3, rank_multiple=2), calibration=tokens
    ).model
    windows = importlib.import_module("common").windows(source, place / "other.txt", 32)[::2][:3]
    row = first["rows"][1]
    precision = {"autocast": source.autocast}
    assert row["perplexity"] == rankfold.perplexity(model, windows, **precision)["perplexity"]
    assert row["parameters"] == sum(p.numel() for p in model.parameters())
    assert (
        first["rows"][0]["perplexity"] == rankfold.perplexity(source.whole_model(), windows, **precision)["perplexity"]
    )
    both = ran(place, monkeypatch)
    assert both["rows"][:2] == first["rows"]
    assert [row["name"] for row in both["rows"][2:]] == ["svd-llm 0.3", "mlp only 0.3"]
    assert set(both["rows"][3]["method"]["modules"]) == {"mlp"}


def test_rows_of_another_configuration_are_refused(place, monkeypatch):
    ran(place, monkeypatch, "--only", "dense")
    with pytest.raises(SystemExit, match="another configuration \\(evaluation\\)"):
        ran(place, monkeypatch, "--set", "evaluation.first=2")


def test_a_row_that_does_not_exist_is_named(place, monkeypatch):
    with pytest.raises(SystemExit, match="no row is called nothing; rows: modegpt rank_multiple=2 0.3"):
        ran(place, monkeypatch, "--only", "nothing")


def test_what_a_compression_holds_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("rankfold.models.devices.multiplies_bf16_fast", lambda: False)  # or states are half as large
    memory = importlib.import_module("memory")
    shape = {"blocks": 2, "width": 32, "hidden": 64, "heads": 2, "samples": 4, "length": 16, "held_out": 1}
    args = Namespace(**shape, dtype="float32", sparsity=0.3, first=None, offload=tmp_path)
    memory.write_model(args, tmp_path / "model")
    facts = memory.worker(args, str(tmp_path), "rankfold", "sequential")
    assert facts["offload"] == "disk" and facts["stream_bytes"] == 4 * 4 * 16 * 32
    assert facts["block_bytes"] == 4 * (4 * 32**2 + 3 * 32 * 64 + 2 * 32) and facts["moments_bytes"] > 8 * 64**2
    assert facts["planned_bytes"] > facts["moments_bytes"] and facts["peak_bytes"] >= facts["warm_bytes"]


def test_a_plan_gives_the_sparsity_of_every_block():
    """By the weights of all its modules; with one score a block, or three."""
    run = importlib.import_module("run")
    modules = [
        {"block": block, "module": name, "dense_weights": dense, "weights": left}
        for block, name, dense, left in ((0, "mlp", 60, 30), (0, "qk", 40, 40), (1, "mlp", 60, 60), (1, "qk", 40, 10))
    ]
    plan = {"modules": modules, "facts": {"temperature": 0.1, "scores": {"0": [0.5, 0.1, 0.4], "1": [0.2, 0.3, 0.1]}}}
    assert run.by_block(plan) == {"blocks": [0.3, 0.3], "scores": [[0.5, 0.1, 0.4], [0.2, 0.3, 0.1]]}
    assert run.shares(modules[:3], 320) == {"share": 0.5, "largest": 0.3}
    assert run.by_block({"modules": modules[1:3], "facts": {}}) == {"blocks": [0.0, 0.0], "scores": None}
    page = importlib.import_module("pages.allocation")
    row = {"blocks": [0.1, 0.5, 0.3], "scores": [[0.4, 0, 0], [0.1, 9, 9], [0.2, 0, 0]]}
    assert page._by_score(row) == [(0.25, 50.0), (0.5, 30.0), (1.0, 10.0)]
    assert page._row(row | {"setting": "x", "perplexity": 12.0}) == ["x", "30.0%", "16.3%", "10.0%", "50.0%", "12.00"]


def test_curves_are_of_rows_that_were_done():
    curves = importlib.import_module("pages.curves")
    rows = [{"setting": name, "sparsity": s, "perplexity": p} for name, s, p in (("a", 0.2, 3.0), ("b", 0.1, 9.0))]
    rows += [{"setting": "a", "sparsity": s, "perplexity": 20 * s} for s in (0.3, 0.1)]
    rows += [{"setting": "b", "sparsity": s, "error": "no"} for s in (0.2, 0.3)]
    found = curves.by_sparsity(rows)
    assert {name: [y for _, y in points] for name, points in found.items()} == {"a": [2.0, 3.0, 6.0]}
    assert [round(x) for x, _ in found["a"]] == [10, 20, 30]
    assert [*curves.lowest({"a": [(1, 5.0)], "b": [(1, 2.0)], "c": [(1, 3.0)]}, 2)] == ["b", "c"]
    assert curves.picture(None, "x.png", "t", {}, x="x", y="y") == []
    assert curves.picture(None, "x.png", "t", found, x="x", y="y") == ["![t](x.png)", ""]


def test_the_table_of_large_models_is_what_plans_say():
    """Plans of two rows are made again; where estimates changed, `python benchmarks/large_models.py`, `render.py`."""
    large = importlib.import_module("large_models")
    record = json.loads((BENCHMARKS / "results" / "large_models.json").read_text(encoding="utf-8"))
    rows, configs = {row["name"]: row for row in record["rows"]}, large.configs()
    assert list(rows) == [f"{name} {method}" for name in configs for method in large.METHODS]
    for name, method in (("Llama 70B", "modegpt"), ("Llama 7B", "rankfold")):
        expected = large.row(configs[name], method)
        found = {key: rows[f"{name} {method}"][key] for key in expected}
        assert found.pop("minutes") == pytest.approx(expected.pop("minutes")) and found == expected
    assert record["config"]["rates_are_measured"] is False


JOBS = ("rates", "parity", "precision", "waits", "blocks", "whole", "speed")


@pytest.fixture(scope="module")
def on_this_cpu(tmp_path_factory) -> dict:
    """The record of all jobs of gpu.py, in tiny sizes."""
    out = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpu.py", *JOBS, "--device", "cpu", "--tiny", "--out", str(out)])
        importlib.import_module("gpu").main()
    return json.loads((out / "gpu.json").read_text(encoding="utf-8"))


def test_every_job_of_an_accelerator_runs_on_a_cpu(on_this_cpu):
    rows = {row["name"]: row for row in on_this_cpu["rows"]}
    assert {row["job"] for row in rows.values()} == {*JOBS}
    assert [name for name, row in rows.items() if "error" in row] == []
    assert all(row["card"] and row["torch"] for row in rows.values())
    compared = [row for row in rows.values() if "kl" in row]
    assert len(compared) > 8 and all(row["kl"] == 0 and row["same_ranks"] for row in compared)  # the device is the CPU
    assert all(row["kl_dense"] > 1e-4 for row in compared)
    assert all(row["same"]["again"] and row["same"]["without reading ahead"] for row in rows.values() if "same" in row)
    for row in rows.values():
        if row["job"] == "precision":
            assert 0 < row["errors"]["a batch"] < 1 and 0 < row["cross_error"] < 1e-5
        if row["job"] in ("blocks", "whole"):
            parts = dict(row["parts"])
            assert parts.pop("total") == pytest.approx(sum(parts.values())) and row["total"] > row["parts"]["total"]
            assert row["block_seconds"] == row["total"] / row["blocks"]
            assert row["whole_minutes"] == row["block_seconds"] * 3 / 60  # of the three blocks of the tiny shape
    dense, small = (rows["speed decode 1"]["weight_bytes"][name] for name in ("dense", "rank multiple 2"))
    assert 0.7 * dense < small < dense


def test_the_entry_for_the_table_of_cards_is_one(on_this_cpu):
    from rankfold.compression.cards import Card

    rows = {row["name"]: row for row in on_this_cpu["rows"]}
    card = Card("cpu", **rows["rates entry"]["entry"])
    seconds, said = rows["rates routine eigh 32"]["seconds"], card.seconds_for({("eigh", 32): 1})
    assert said == pytest.approx(max(card.solver_ms * 1e-3, seconds)) and card.is_measured


def test_what_is_there_is_not_measured_again_and_what_does_not_fit_is_left(tmp_path, monkeypatch, capsys):
    gpu, common = (importlib.import_module(name) for name in ("gpu", "common"))
    line = ["gpu.py", "precision", "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    monkeypatch.setattr(common, "STARTED", common.time.perf_counter())
    monkeypatch.setattr(sys, "argv", [*line, "--limit", "0"])
    gpu.main()
    assert "left out for time, run the same command again: precision 64 rows x 48" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", line)
        gpu.main()
        rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"]
        assert [row["name"] for row in rows] == ["precision 64 rows x 48", "precision 128 rows x 48"]
    said = capsys.readouterr().err
    assert said.count("precision 64 rows") == 1


def test_a_job_that_fails_is_a_row_and_the_next_one_runs(tmp_path, monkeypatch):
    gpu, common = (importlib.import_module(name) for name in ("gpu", "common"))

    def fail(bench):
        raise RuntimeError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(common, "STARTED", common.time.perf_counter())
    monkeypatch.setitem(gpu.JOBS, "rates", fail)
    line = ["gpu.py", "rates", "precision", "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", line)
    gpu.main()
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"]
    assert rows[0]["name"] == "rates as a whole" and rows[0]["error"] == "RuntimeError: CUDA out of memory."
    assert [row["job"] for row in rows[1:]] == ["precision", "precision"]


def test_a_cpu_is_no_record_of_an_accelerator(on_this_cpu, monkeypatch):
    page = importlib.import_module("pages.gpu")
    with pytest.raises(ValueError, match="none of an accelerator"):
        page.gpu(on_this_cpu)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "rates", "--device", "cpu", "--tiny"])
    monkeypatch.delenv("OUT", raising=False)
    with pytest.raises(SystemExit, match="give --out DIR"):
        importlib.import_module("gpu").main()


def test_the_page_of_an_accelerator_has_every_job_and_the_errors(on_this_cpu):
    page = importlib.import_module("pages.gpu")
    failed = {"name": "rates product", "job": "rates", "card": "a card", "torch": "2", "error": "OutOfMemoryError: no"}
    rows = [row | {"card": "a card", "clocks.sm": "1980"} for row in on_this_cpu["rows"]]
    lines = page.gpu({**on_this_cpu, "config": {"device": "cuda", "tiny": False}, "rows": [*rows, failed]})
    assert [line for line in lines if line.startswith("###")] == [f"### {title}" for title, _ in page.SECTIONS.values()]
    assert "- product: OutOfMemoryError: no" in lines
    (row,) = (row for row in rows if row["name"] == "rates routine calls 32")
    found = next(line for line in lines if line.startswith("| routine calls 32 |"))
    assert found.split("|")[2].strip() == f"{1e3 * row['seconds']:.3g}"
    assert "a card, torch" in "".join(lines) and "1980 to 1980 MHz" in "".join(lines)


def test_waits_are_counted_by_the_line_that_made_them():
    """What torch warns of on an accelerator; here a stand-in warns."""
    import warnings

    import torch

    waits = importlib.import_module("accelerator.waits")
    bench = type("Bench", (), {"device": torch.device("cpu")})
    with waits.counted(bench) as places:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    ((place, count),) = places.items()
    assert count == 3 and place.startswith("test_benchmark_scripts.py:")
    assert waits.place_of("/home/somebody/site-packages/rankfold/linalg/psd.py", 7) == "rankfold/linalg/psd.py:7"


def test_rows_keep_the_versions_and_threads_that_they_were_measured_with(tmp_path, monkeypatch):
    """And the page names all of them, as it does with processors."""
    import common
    import render

    monkeypatch.setattr(common, "versions", lambda: {"torch": "2.13.0", "transformers": "5.23.0"})
    common.Record(tmp_path / "record.json", {}, {}).add("first")
    monkeypatch.setattr(common, "versions", lambda: {"torch": "2.13.0", "transformers": "5.24.0"})
    monkeypatch.setattr(common.torch, "get_num_threads", lambda: 7)
    record = common.Record(tmp_path / "record.json", {}, {}, resume=True)
    record.add("second")
    first, second = record.value["rows"]
    assert first["versions"]["transformers"] == "5.23.0" and "versions" not in second
    assert first["threads"] != 7 and "threads" not in second
    assert render.heading(record.value)[-2].endswith(" and 7 threads; torch 2.13.0, transformers 5.23.0 and 5.24.0.")
