"""Compress a model and recover it: one call, one folder, one record.

    dense model --- compress ---> OUT.compressed --- recover, with OUT.partial ---> OUT

A killed run goes on in the half in which it was.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import pipeline
from .._utils.processes import on_first
from ..calibration.store import MomentStore
from ..data.calibration_data import CalibrationData
from ..errors import UnsupportedModelError
from ..methods import Method
from ..models.dense_model import DenseModel
from ..report.goal import Goal
from ..report.plan import Plan
from .options import check_processes, check_seed
from .recover import RecoveryResult, recover


def compress_and_recover(
    source: DenseModel,
    method: Method,
    tokens: CalibrationData | None,
    output: str | Path,
    *,
    minutes: float,
    texts: str | Mapping[str, float],
    mode: str,
    moments: MomentStore | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    goal: Goal | None = None,
    **training,
) -> RecoveryResult:
    """Compress an open model, and train the result with that model as its teacher.

    Args:
        source, method, tokens, output, moments, mode, on_plan, goal: as for :func:`rankfold.pipeline.compress`.
        minutes, texts, training: ``minutes``, ``calibration`` and other options of :func:`rankfold.recover`.

    Raises:
        UnsupportedModelError: what would come out cannot be trained.
        RankfoldError: as of both.
    """
    check_processes()
    check_seed(training.get("seed", 0))
    if not source.architecture.decoder or getattr(method, "bits", 0):
        raise UnsupportedModelError(
            f"what {method.name} makes of {source.name} cannot be trained: it predicts no tokens, or has quantised "
            "factors; compress it without recovery"
        )
    output = Path(output)
    compressed = output.with_name(f"{output.name}.compressed")
    mode = pipeline.check_request(method, tokens, moments, mode, output)
    how: dict[str, Any] = {"moments": moments, "mode": mode, "on_plan": on_plan, "goal": goal}
    pipeline.compress_once(source, method, tokens, compressed, **how)
    training |= {"minutes": minutes, "device": str(source.device)}
    found = recover(compressed, source, calibration=texts, output=output, **training)
    on_first(lambda: shutil.rmtree(compressed))
    return found
