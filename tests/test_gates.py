"""The gates name methods that exist, what is kept is what it says, and a run names what falls short."""

import importlib
import json
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="rankfold[report] is not installed")

from rankfold.methods import make_method
from saved import save_text, save_tiny

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def gates():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("gates")


def test_every_gate_is_of_a_method_and_a_measure(gates):
    for model, gate in tomllib.loads(gates.GATES.read_text(encoding="utf-8")).items():
        methods = {name: limits for name, limits in gate.items() if name not in gates.SETTINGS}
        assert methods, model
        for method, limits in methods.items():
            for sparsity, least in limits.items():
                make_method(method, sparsity=float(sparsity))
                assert least and set(least) <= {*gates.DEFINITIONS} - (set() if "tasks" in gate else {"tasks"})
                assert all(0 < value <= 1 for value in least.values())


def measured(perplexity: float, piqa: float, copying: float, equal: float) -> dict:
    exact = {"copying": {"share": copying}, "arithmetic": {"share": 0.1}}
    tasks = {"piqa": {"acc": piqa}, "arc_easy": {"acc": 0.3}}
    return {"texts": [{"perplexity": perplexity}], "tasks": tasks, "generation": {"exact": exact, "equal": equal}}


def test_what_is_kept_by_hand_and_what_falls_short(gates):
    kept = gates.kept_of(measured(25.0, 0.5, 0.4, 0.2), measured(20.0, 0.7, 0.9, 1.0))
    assert kept == {"perplexity": 0.8, "tasks": pytest.approx(0.8), "exact": pytest.approx(0.5), "equal": 0.2}
    row = {"name": "svd 0.3", "kept": kept, "least": {"perplexity": 0.8, "exact": 0.6, "equal": 0.2}}
    assert gates.falls_short(row) == ["svd 0.3: exact keeps 0.500 of the dense model, 0.6 is wanted"]
    assert gates.falls_short({"name": "svd 0.3", "error": "out of memory"}) == [
        "svd 0.3: could not be done (out of memory)"
    ]
    row |= {"setting": "svd", "sparsity": 0.3}
    page = importlib.import_module("pages.gates").gates({"definitions": dict.fromkeys(kept, ""), "rows": [row]})
    assert page[-1] == "| `svd` | 30% | 0.800 (≥ 0.8) | 0.800 | **0.500** (≥ 0.6) | 0.200 (≥ 0.2) |"
    row["written"], dense = {"copying": 0.25, "tokens": None}, {"copying": 0.75, "tokens": 32.0}
    record = {"definitions": {}, "rows": [row], "written by the dense model": dense}
    page = importlib.import_module("pages.gates").gates(record)
    assert page[-2:] == ["| dense | 0.75 | 32 |", "| `svd` 30% | 0.25 | – |"]


def test_a_run_writes_its_record_and_ends_with_what_falls_short(gates, tmp_path, monkeypatch, capsys):
    save_tiny(tmp_path / "tiny", blocks=1)
    (tmp_path / "tasks").mkdir()
    for name in ("text", "other"):
        save_text(tmp_path / f"{name}.txt")
    file = tmp_path / "gates.toml"
    text = """
        [tiny]
        file = "tiny"
        dtype = "auto"
        calibration = { text = "text.txt", num_samples = 4, max_length = 32 }
        text = { name = "other.txt", length = 32, windows = 2 }
        prompts = 1
        [tiny.svd]
        "0.4" = { perplexity = 0.01, equal = 1.0 }
        [absent]
        file = "absent"
    """
    file.write_text(text, encoding="utf-8")
    monkeypatch.setenv("RANKFOLD_MODELS", str(tmp_path))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    line = ["gates.py", "--gates", str(file), "--results", str(tmp_path / "results"), "--data", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", line)
    assert gates.main() == 1
    out, err = capsys.readouterr()
    assert (
        out.splitlines()[0].startswith("SHORT  svd 0.4: equal keeps 0.")
        and out.splitlines()[-1] == "1 gates fall short"
    )
    assert "absent: left out, it is not at hand" in err
    (row,) = json.loads((tmp_path / "results" / "gates_tiny.json").read_text(encoding="utf-8"))["rows"]
    assert row["least"] == {"perplexity": 0.01, "equal": 1.0} and row["kept"]["perplexity"] > 0
    assert row["written"].keys() == {"copying", "arithmetic", "repetition", "distinct", "tokens"}
    assert not list(tmp_path.glob("rankfold-gates-*"))


def test_the_halves_of_a_text_share_no_line(gates, tmp_path):
    (tmp_path / "text.txt").write_text("a\nb\nc\nd\ne\n", encoding="utf-8")
    places = [
        gates.place_of_text(str(tmp_path), "text.txt", {"half": half}, tmp_path / "made")
        for half in ("first", "second")
    ]
    assert [Path(place).read_text(encoding="utf-8") for place in places] == ["a\nb\n", "c\nd\ne\n"]
    assert gates.place_of_text(str(tmp_path), "text.txt", {}, tmp_path / "other") == str(tmp_path / "text.txt")
    assert not (tmp_path / "other").exists()
