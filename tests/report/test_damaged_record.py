"""A damaged rankfold.json: whatever reads a record uses it, or says in one line that it is damaged."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from attacks.mutations import places

from families import opened, tokens
from rankfold import MoDeGPT, pipeline
from rankfold.cli import config, inspect
from rankfold.cli.common import result_of
from rankfold.comparison.compare import _modules
from rankfold.compression.result import CompressionResult
from rankfold.errors import CheckpointError
from rankfold.report.model_card import model_card
from rankfold.report.record import NAME, read_record, records_of

VALUES = ("missing", None, "x", -1, [1], {"a": 1})
KIND = {"passages": 1, "perplexity_dense": 2.0, "perplexity": 3.0, "ratio": 1.5, "standard_error": 0.1}
KINDS = {"kinds": {"prose": KIND | {"is_known": True, "is_damaged": True}}, "warning": "damaged"}
LOSS = {"perplexity_dense": 2.0, "perplexity_before": 3.0, "perplexity": 2.5, "ratio": 1.25, "standard_error": None}
TRAINED = {
    "recovered": True,
    "tune": "all",
    "loss": "kl",
    "lr": 1e-4,
    "length": 8,
    "seed": 0,
    "teacher_name": "owner/dense",
    "texts": {"a text": {"num_samples": 4}},
    "tokens_seen": 32,
    "tuned_parameters": 10,
    "probe_texts_before": KINDS,
    "held_out": {"a text": LOSS | {"sequences": 2}},
}
GOAL = {"option": "keep_quality", "asked": 0.9, "predicted": None, "got": 0.8, "earlier_runs": []}


SILENT = SimpleNamespace(print=lambda *lines, **_: [str(line) for line in lines], width=80)
READERS = {
    "inspect": lambda record: [inspect._print(one, SILENT) for one in records_of(record)],
    "inspect --json": result_of,
    "model card": lambda record: model_card(record, "small"),
    "result": lambda record: str(CompressionResult.of_folder(Path("small"))),
    "compare": _modules,
    "--config": lambda record: config._read_run(SimpleNamespace(resilient_parsing=False), Path("small")),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A record with everything in it that one can have."""
    folder = tmp_path_factory.mktemp("whole") / "small"
    pipeline.compress(opened("llama"), MoDeGPT(sparsity=0.3, rank_multiple=2), tokens(), folder)
    record = json.loads((folder / NAME).read_text())
    record["plan"]["modules"], record["plan"]["part"] = record["plan"]["modules"][:1], "language"
    record["blocks"] = {"0": record["blocks"]["0"]}
    record |= {
        "probe_texts": KINDS,
        "recovery": TRAINED | {"recovered": False, "unchanged_because": "no text gains", "earlier": TRAINED},
        "goal": GOAL | {"later_runs": [{"sparsity": 0.2, "got": 0.9}]},
    }
    return record | {"before": copy.deepcopy(record)}


def _ways(record):
    """Every place of a record; of the one before it only the first keys, as what reads it is the same."""
    return [path for path in places(record) if path and ("before" not in path[:1] or len(path) < 3)]


def _damaged(record, path, value):
    found = copy.deepcopy(record)
    place = found
    for key in path[:-1]:
        place = place[key]
    if value == "missing":
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return found


def test_a_damaged_record_is_used_or_refused(whole, tmp_path, monkeypatch):
    used = refused = 0
    for path in _ways(whole):
        for value in VALUES:
            (tmp_path / NAME).write_text(json.dumps(_damaged(whole, path, value)))
            try:
                record = read_record(tmp_path)
            except CheckpointError:
                refused += 1
                continue
            for module in ("report.record", "compression.result"):
                monkeypatch.setattr(f"rankfold.{module}.read_record", lambda _, found=record: copy.deepcopy(found))
            for name, read in READERS.items():
                try:
                    read(record)
                    used += 1
                except CheckpointError:
                    refused += 1
                except Exception as error:
                    pytest.fail(f"{name}, {'.'.join(map(str, path))} = {value!r}: {error!r}")
    assert used > 1000 and refused > 300


def test_a_record_in_a_record_without_end_is_refused(whole, tmp_path):
    trained = json.dumps(_damaged(whole["recovery"], ("earlier",), "missing"))[:-1]
    deep = f'{trained}, "earlier": ' * 900 + "null" + "}" * 900
    text = f'{json.dumps(_damaged(whole, ("recovery",), "missing"))[:-1]}, "recovery": {deep}}}'
    (tmp_path / NAME).write_text(text)
    with pytest.raises(CheckpointError, match="is damaged: it is nested too deeply; copy or make it again"):
        read_record(tmp_path)
