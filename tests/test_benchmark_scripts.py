"""The scripts in benchmarks/ take hours: what they import is there, experiments can be run, and records give their pages."""

import ast
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

import rankfold
from rankfold.methods import make_method, method_names
from saved import save_text, save_tiny

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = sorted([*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("pages/*.py")])
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
    assert {row.method for row in experiment.rows(experiment.read("grid_smollm2"))} == {*method_names()}


def test_records_give_the_pages_that_are_there():
    pytest.importorskip("matplotlib", reason="rankfold[report] is not installed")
    pages = importlib.import_module("render").pages(BENCHMARKS / "results")
    others = ("index", "robustness")
    written = {path.stem: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md") if path.stem not in others}
    assert pages.keys() == written.keys()
    assert [name for name in pages if pages[name] != written[name]] == []


def test_the_tables_of_readme_and_results_are_what_the_records_say():
    readme = importlib.import_module("pages.readme")
    for path, lines in (
        (BENCHMARKS.parent / "README.md", readme.short(BENCHMARKS / "results")),
        (DOCS / "index.md", readme.table(BENCHMARKS / "results")),
    ):
        assert "\n\n" + "\n".join(lines) + "\n\n" in path.read_text(encoding="utf-8")


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
    assert row["perplexity"] == rankfold.perplexity(model, windows)["perplexity"]
    assert row["parameters"] == sum(p.numel() for p in model.parameters())
    assert first["rows"][0]["perplexity"] == rankfold.perplexity(source.whole_model(), windows)["perplexity"]
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
