"""Run the grid: compress, load what was written, measure it like every other row, keep the row."""

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from .. import pipeline
from .._utils.files import writing
from .._utils.memory import release_memory
from .._utils.processes import from_first, is_first, on_first, together
from .._utils.progress import one_run, track
from .._utils.sizes import plural
from ..allocation import unique_parameters
from ..calibration.store import MomentStore
from ..checkpoint.load import load_model
from ..compression.budget import check_by_shapes
from ..compression.importance import available, needed
from ..data.calibration_data import CalibrationData
from ..errors import RankfoldError, option
from ..evaluation.complexity import cache_bytes
from ..models.dense_model import DenseModel
from ..models.weights import buffer_bytes
from ..report.identity import comparison_identity, dtype_name
from ..report.outcomes import excess_of
from ..report.record import environment, read_record, versions
from .folder import DENSE, Folder
from .grid import Cell
from .measures import Measures
from .protocol import Rules
from .report.page import write_report, write_rows
from .report.table import COMMON

log = logging.getLogger(__name__)


@one_run()
def compare(
    source: DenseModel,
    cells: Sequence[Cell],
    tokens: CalibrationData,
    measures: Measures,
    output: str | Path,
    *,
    keep: bool = False,
    rules: Rules | None = None,
    on_row: Callable[[dict], None] = lambda row: None,
) -> list[dict]:
    """Compress a model by every cell and measure the results and the dense model alike.

    Cells that can be computed from moments of the dense model share them: it is calibrated once. A cell that cannot be
    done becomes a row that says why, and the others go on. Rows are kept as soon as they are done, so the same call
    continues after a kill; further cells may be added to a folder of the same model, calibration and measures.

    Args:
        source: an open model.
        cells: of :func:`~.grid.cells_of`.
        tokens: calibration samples.
        measures: what is measured.
        output: folder of the comparison.
        keep: keep the compressed models and the moments, in ``cells`` of the folder.
        rules: a protocol that the run follows; what it keeps of the dense model's quality goes into every row.
        on_row: called with every new row.

    Returns:
        The rows of these cells behind the row of the dense model; ``status`` is ``done`` or ``failed``, with an
        ``error``.

    Raises:
        RankfoldError: no cell can be done; the dense model cannot be measured; or the folder cannot be used.
    """
    impossible = _impossible(source, cells)
    if len(impossible) == len(cells):
        error = next(iter(impossible.values()))
        raise error
    identity = from_first(lambda: comparison_identity(source, tokens.describe(), measures.describe()))
    if rules:
        identity["protocol"] = rules.describe(identity)
    folder = Folder(Path(output), identity)
    common = _common_texts(tokens, identity)
    for text in common:
        log.warning("warning: %s", COMMON.format(text))
    with folder.working(cells) if is_first() else contextlib.nullcontext():
        kept, done = from_first(lambda: (folder.kept(), folder.all_done([DENSE, *(cell.key for cell in cells)])))
        lost = done - {DENSE} - kept
        if keep and lost:
            told = "no models were kept of %s done before: give %s with another folder"
            log.warning(told, plural(len(lost), "row"), option("keep", True))
        work = CellRunner(source, tokens, measures, folder, [cell for cell in cells if cell.key not in impossible])

        def judged(row: dict, dense: dict) -> dict:
            return row | {"protocol": rules.protocol.retention(row, dense)} if rules and row["measures"] else row

        def take(cell: Cell, row: dict) -> None:
            row = judged(row, folder.row(DENSE))
            folder.keep(cell.key, row)
            if not keep:
                folder.clear(kept, [cell])
            write_rows(folder.path, folder.config(), folder.rows())
            on_row(row)

        def report() -> list[dict]:
            if not keep:
                folder.clear(kept)
            with writing(folder.path):
                write_report(folder.path, folder.config(), folder.rows())
            return [folder.row(key) for key in (DENSE, *(cell.key for cell in cells))]

        def take_dense(row: dict) -> None:
            folder.keep(DENSE, judged(row, row))
            on_row(folder.row(DENSE))

        if DENSE not in done:
            on_first(partial(take_dense, work.dense_row() | {"common_texts": common}))
        for cell in track([cell for cell in cells if cell.key not in done], "comparing"):
            error = impossible.get(cell.key)
            row = _failed(cell, error) if error else work.run(cell)
            on_first(partial(take, cell, row))
        return from_first(report)


def _impossible(source: DenseModel, cells: Sequence[Cell]) -> dict[str, RankfoldError]:
    """Key -> error of the cells that fail by shapes alone: by the architecture, or by a sparsity out of reach."""
    found = {}
    for cell in cells:
        try:
            cell.method.supported_modules(source.architecture, source.meta_block(0))
            check_by_shapes(source, cell.method)
        except RankfoldError as error:
            found[cell.key] = error
    return found


def _common_texts(tokens: CalibrationData, identity: dict) -> list[str]:
    """Return the texts that are measured and calibrated on."""
    calibrated = {tokens.origin, *(part.origin for part in tokens.texts)}
    return [text["text"] for text in identity["measures"].get("texts", []) if text["origin"] in calibrated]


class CellRunner:
    """Compress a model by one cell after another and measure each result; the cells share the dense model and its
    moments.

    Args:
        cells: that are to be tried, done already or not: the statistics of shared moments depend on all of them.
    """

    def __init__(
        self, source: DenseModel, tokens: CalibrationData, measures: Measures, folder: Folder, cells: Sequence[Cell]
    ):
        self.source, self.tokens, self.measures, self.folder = source, tokens, measures, folder
        takers = [cell for cell in cells if self._shares(cell)]
        self.statistics = set().union(*(needed(source, cell.method) for cell in takers))
        self._moments: MomentStore | None = None
        self._dense = lambda: None

    def _shares(self, cell: Cell) -> bool:
        return cell.takes_moments(self.source.meta_blocks())

    def moments(self) -> MomentStore:
        """Of the dense model; measured when the first row wants them."""
        if self._moments is None:
            statistics = available(self.source, self.statistics)
            self._moments = pipeline.calibrate(
                self.source, self.tokens, self.folder.moments(statistics), statistics=statistics
            )
        return self._moments

    def dense(self) -> PreTrainedModel:
        """The dense model; it is gone again when nobody holds it."""
        model = self._dense()
        if model is None:
            model = self.measures.load_dense()
            self._dense = weakref.ref(model)
        return model

    def dense_row(self) -> dict:
        model = self.dense()
        parameters, dtype = unique_parameters(model), self.source.dtype
        counts = {
            "sparsity": 0.0,
            "parameters": parameters,
            "bytes": parameters * dtype.itemsize + buffer_bytes(model, dtype),
            "kv_bytes_per_token": cache_bytes(model),
        }
        row = _row("dense", 0.0, None, None) | {"counts": counts}
        return row | self._measured(model)

    def run(self, cell: Cell) -> dict:
        """The row of a cell, or of its failure."""
        try:
            with together():
                return self._run(cell)
        except (RankfoldError, MemoryError, torch.OutOfMemoryError) as error:
            release_memory()
            return _failed(cell, error)

    def _run(self, cell: Cell) -> dict:
        path = self.folder.checkpoint(cell.key)
        if not from_first(path.exists):  # else a kill came while it was measured
            moments = self.moments() if self._shares(cell) else None
            tokens = None if moments else self.tokens
            pipeline.compress(self.source, cell.method, tokens, path, moments=moments, mode=cell.mode)
        return self._row_of(cell, path)

    def _row_of(self, cell: Cell, path: Path) -> dict:
        record = read_record(path)
        model = load_model(path, dtype=dtype_name(self.source), device=str(self.source.device))
        row = _row(cell.label, cell.method.sparsity, cell.method.describe(), cell.mode)
        row |= {
            "moments": "shared" if self._shares(cell) else "own",
            "counts": record["counts"],
            "excess": excess_of(record),
            "modules": _modules(record),
            "held_out": record.get("held_out"),
            "probe_texts": record.get("probe_texts"),
            "compress_seconds": record["run"]["seconds"]["total"],
        }
        return row | self._measured(model)

    def _measured(self, model: PreTrainedModel) -> dict:
        begin = time.perf_counter()
        found = self.measures(model, self.dense)
        return {
            "measures": found,
            "measure_seconds": time.perf_counter() - begin,
            "versions": versions(*(["lm_eval"] if "tasks" in found else [])),
            "environment": environment(self.source.device),
        }


def _row(label: str, sparsity: float, method: dict | None, mode: str | None) -> dict:
    return {
        "label": label,
        "status": "done",
        "error": None,
        "sparsity": sparsity,
        "method": method,
        "mode": mode,
        "moments": None,
        "counts": None,
        "excess": None,
        "modules": [],
        "held_out": None,
        "probe_texts": None,
        "compress_seconds": None,
        "measures": None,
        "versions": {},
        "environment": {},
    }


def _failed(cell: Cell, error: BaseException) -> dict:
    reason = str(error).strip() if isinstance(error, RankfoldError) else "out of memory"
    row = _row(cell.label, cell.method.sparsity, cell.method.describe(), cell.mode)
    return row | {"status": "failed", "error": reason}


def _modules(record: dict) -> list[dict]:
    """Rank, weights and error of every module, out of the plan and the reports of a run record."""
    found = []
    for module in record["plan"]["modules"]:
        report = record["blocks"].get(str(module["block"]), {}).get(module["module"], {})
        facts = {key: module[key] for key in ("block", "module", "rank", "of", "weights", "dense_weights")}
        found.append(facts | {key: report.get(key) for key in ("relative_error", "held_out_error")})
    return found
