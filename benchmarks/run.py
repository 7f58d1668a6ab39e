"""Run experiments: compress a model by every setting of a YAML file, measure all results alike, keep one row of each.

Rows are kept as soon as they are done, and a killed run continues with the same command. Failed rows are retried.

    python benchmarks/run.py perplexity_smollm2
    python benchmarks/run.py grid_opt-6m --only rankfold slicegpt --sparsity 0.3
    python benchmarks/run.py my.yaml --set calibration.samples=4 evaluation.first=2 --json out.json
"""

import argparse
import itertools
import os
import tempfile
import time
from pathlib import Path

import common
from experiment import DENSE, Row, read, rows
from measures import MEASURES, Perplexities
from rankfold.checkpoint.load import load_model
from rankfold.comparison import Cell, CellRunner, Folder, Measures
from rankfold.errors import OptionError
from rankfold.recovery.recover import recover
from rankfold.report.identity import dtype_name
from rankfold.report.record import read_record
from texts import TextFiles, described

# Of a recovery, in its row.
TRAINED = (
    *("recovered", "unchanged_because", "tune", "loss", "lr", "rank", "tokens_seen", "tuned_parameters"),
    *("best_step", "held_out", "seconds"),
)


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("experiments", nargs="+", metavar="EXPERIMENT", help="name in experiments/, or a YAML file")
    parser.add_argument("--json", type=Path, metavar="OUT", help="record; default: results/EXPERIMENT.json")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="settings, studies, calibrations, rows, or `dense`")
    parser.add_argument("--sparsity", type=float, nargs="+", help="only rows of these")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="e.g. calibration.seed=1 model=DIR")
    common.add_precision(parser)
    common.add_data(parser)
    args = parser.parse_args()
    if args.json and len(args.experiments) > 1:
        parser.error("--json takes one experiment; leave it out, or run the experiments one by one")
    for name in args.experiments:
        run(name, args)


def run(name: str, args: argparse.Namespace) -> None:
    """Add the rows that the record of one experiment lacks."""
    experiment, path = read(name, args.set), args.json or common.RESULTS / f"{Path(name).stem}.json"
    wanted = chosen(list(rows(experiment)), args.only, args.sparsity)
    source = common.open_source(os.path.expandvars(experiment["model"]), args.precision)
    with tempfile.TemporaryDirectory(prefix="rankfold-") as place:
        work = Experiment(
            experiment, source, TextFiles(args.data, Path(place), experiment.get("texts", {})), Path(place)
        )
        record = common.Record(path, work.config(), experiment["definitions"], resume=True)
        record.value["benchmark"] = experiment["page"]
        wanted = [row for row in wanted if not record.done(row.name)]
        if not record.done(DENSE) and (not args.only or DENSE in args.only):
            work.dense(record)
        for (calibration, windows), some in itertools.groupby(wanted, key=lambda row: (row.calibration, row.windows)):
            work.add(record, list(some), calibration, windows)
    common.say(f"wrote {common.shown(str(path))}")


def chosen(found: list[Row], only: list[str] | None, sparsities: list[float] | None) -> list[Row]:
    """Return the rows that ``--only`` and ``--sparsity`` name: by their own name, or by every kind of label named."""
    labels = [{"name": row.name} | {k: v for k, v in row.labels.items() if k != "sparsity"} for row in found]
    given = set(only or ())
    named = {key: given & {one[key] for one in labels if key in one} for key in ("setting", "study", "calibration")}
    unknown = given - {value for one in labels for value in one.values()} - {DENSE}
    if unknown:
        raise SystemExit(f"no row is called {', '.join(sorted(unknown))}; rows: {', '.join(row.name for row in found)}")

    def matches(one: dict) -> bool:
        by_label = any(named.values()) and all(one.get(key) in names for key, names in named.items() if names)
        return only is None or one["name"] in given or by_label

    pairs = zip(found, labels, strict=True)
    return [row for row, one in pairs if matches(one) and (not sparsities or row.labels["sparsity"] in sparsities)]


class Experiment:
    """Everything that the rows of one experiment share."""

    def __init__(self, experiment: dict, source, files: TextFiles, place: Path):
        self.experiment, self.source, self.files, self.place = experiment, source, files, place
        self.how = experiment["calibration"]
        self.functions = {
            name: MEASURES[name](source, files, how) for name, how in experiment.get("measure", {}).items()
        }
        if evaluation := experiment.get("evaluation"):
            every = {key: value for key, value in evaluation.items() if not isinstance(value, dict)}
            texts = (
                {"": every} if "text" in every else {n: how | every for n, how in evaluation.items() if n not in every}
            )
            length = self.how["length"]
            windows = {name: files.evaluation(source, how, length).contiguous() for name, how in texts.items()}
            names = {name: name or described(how["text"], how) for name, how in texts.items()}
            autocast = None if experiment.get("evaluate_in") == "float32" else source.autocast
            self.functions = {"perplexity": Perplexities(windows, names, autocast)} | self.functions
        dtype = dtype_name(source)
        path = common.model_path(os.path.expandvars(experiment["model"]))
        self.measures = Measures(self.functions, lambda: load_model(path, dtype=dtype, device="cpu"))

    def config(self) -> dict:
        """Return whatever would make two rows incomparable if it differed."""
        if not self.how.get("text"):  # every row has its own
            calibration = {key: self.how[key] for key in ("samples", "length", "seed")}
        else:
            tokens = self.files.calibration(self.source, self.how)
            calibration = common.describe_tokens(tokens.ids, described(self.how["text"], self.how), tokens.seed)
        evaluated = self.functions.get("perplexity")
        facts = {
            "model": common.describe_model(self.source),
            "precision": common.precision(self.source, evaluated),
            "calibration": calibration,
        }
        for function in self.functions.values():
            facts |= function.describe()
        facts |= {key: self.experiment[key] for key in ("recover",) if key in self.experiment}
        return facts | self.experiment.get("protocol", {})

    def dense(self, record: common.Record) -> None:
        """Add the row of the dense model."""
        keep(record, DENSE, {"setting": DENSE, "sparsity": 0.0}, self.runner([]).dense_row())

    def runner(self, cells: list, calibration: str | None = None, windows: int | None = None) -> CellRunner:
        """Return what compresses and measures rows that share calibration windows."""
        text = self.experiment.get("calibrations", {}).get(calibration)
        tokens = self.files.calibration(self.source, self.how, text, windows) if cells else None
        folder = Folder(self.place / f"rows-{calibration}-{windows}", {})
        (folder.path / "cells").mkdir(parents=True, exist_ok=True)
        return CellRunner(self.source, tokens, self.measures, folder, cells)

    def add(self, record: common.Record, wanted: list[Row], calibration: str | None, windows: int | None) -> None:
        """Add rows that share their calibration windows."""
        cells = []
        for row in wanted:
            try:
                cells.append((row, row.cell(self.source)))
            except OptionError as error:  # a method that does not exist at these ranks is a result
                keep(
                    record,
                    row.name,
                    row.labels,
                    {"status": "failed", "error": str(error), "method": None, "mode": row.mode},
                )
        runner = self.runner([cell for _, cell in cells], calibration, windows)
        for _, same in itertools.groupby(cells, key=lambda pair: pair[1].key):
            rows_of_cell = list(same)
            cell = rows_of_cell[0][1]
            found = runner.run(cell)
            for row, _ in rows_of_cell:
                trains = row.recovery is not None and found["status"] == "done"
                labels = row.labels | ({"windows": len(runner.tokens.ids)} if "study" in row.labels else {})
                labels |= {"sha256": runner.tokens.sha256}
                if self.experiment.get("blocks") and found["status"] == "done":
                    labels |= by_block(read_record(runner.folder.checkpoint(cell.key))["plan"])
                keep(record, row.name, labels, self.recovered(row.recovery, cell, found, runner) if trains else found)
            runner.folder.clear(set(), [cell])

    def recovered(self, recovery: dict, cell: Cell, found: dict, runner: CellRunner) -> dict:
        """Return what is found of a compressed model once it is trained, in place of what was found before.

        Args:
            recovery: options of :func:`rankfold.recover`, and ``text``: name -> share, or one name.
        """
        options, begin = dict(recovery), time.perf_counter()
        given = options.pop("text")
        texts = {
            self.files.path(name): share for name, share in (given if isinstance(given, dict) else {given: 1}).items()
        }
        with tempfile.TemporaryDirectory(dir=self.place) as place:
            out, compressed = Path(place, "recovered"), runner.folder.checkpoint(cell.key)
            record = recover(compressed, self.source, calibration=texts, output=out, **options).record
            model = load_model(out, dtype=dtype_name(self.source), device="cpu")
            measures = runner.measures(model, runner.dense)
        facts = {key: record["recovery"][key] for key in TRAINED if key in record["recovery"]}
        more = {"measures": measures, "probe_texts": record.get("probe_texts"), "recovery": facts}
        seconds = time.perf_counter() - begin - facts["seconds"]
        return found | more | {"measure_seconds": seconds}


def keep(record: common.Record, name: str, labels: dict, row: dict) -> None:
    """Add what :class:`rankfold.comparison.CellRunner` found as a row of the record."""
    record.drop(name)
    facts = labels | {"mode": row["mode"], "method": row["method"]}
    if row["status"] == "failed":
        record.add(name, **facts, error=row["error"])
        return common.say(f"{name}: {row['error']}")
    measured = {key: value for found in row["measures"].values() for key, value in found.items()}
    facts |= counts(row) | measured | {"evaluate_seconds": row["measure_seconds"]}
    facts |= {"recovery": row["recovery"]} if "recovery" in row else {}
    record.add(name, **facts)
    common.say(f"{name}: {measured.get('perplexity') or measured.get('mean') or 'done'}")


def counts(row: dict) -> dict:
    """Return what a run record says of every row."""
    found, held_out = row["counts"], row["held_out"]
    facts = {
        "removed": found["sparsity"],
        "parameters": found["parameters"],
        "bytes": found["bytes"],
        "zeros": "zeros" in found,
        "compress_seconds": row["compress_seconds"],
    }
    if held_out:
        facts |= {"held_out_ratio": held_out["ratio"], "damaged": bool(held_out["warning"]), "held_out": held_out}
    if row["modules"]:
        facts |= {"probe_texts": row["probe_texts"]} | shares(row["modules"], found["counted_weights"])
    return facts


def losses(modules: list[dict]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the weights that every block lost, and those that it had."""
    lost, there = {}, {}
    for module in modules:
        block = module["block"]
        lost[block] = lost.get(block, 0) + module["dense_weights"] - module["weights"]
        there[block] = there.get(block, 0) + module["dense_weights"]
    return lost, there


def by_block(plan: dict) -> dict:
    """Return the sparsity of every block, and the scores that an allocation went by."""
    lost, there = losses(plan["modules"])
    scores = {key: list(plan["facts"][key].values()) for key in ("scores", "outliers") if key in plan["facts"]}
    return {
        "blocks": [round(lost[block] / there[block], 4) for block in there],
        "scores": next(iter(scores.values()), None),
    }


def shares(modules: list[dict], counted: int) -> dict:
    """Return the share of the modules that are compressed, and the sparsity of the block that loses most."""
    lost, there = losses(modules)
    return {"share": sum(there.values()) / counted, "largest": max(lost[block] / there[block] for block in there)}


if __name__ == "__main__":
    main()
