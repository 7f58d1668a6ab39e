"""What a number depends on: equal identities mean equal results."""

from collections.abc import Iterable
from typing import Any

from .._utils.present import present
from ..calibration.runner import BATCH_TOKENS, batch_tokens
from ..calibration.store import MomentStore
from ..data.calibration_data import CalibrationData
from ..methods import Method
from ..models.dense_model import DenseModel
from .plan import Plan


def moments_identity(source: DenseModel, tokens: CalibrationData, statistics: Iterable[str]) -> dict[str, Any]:
    """Return the identity of moments: model, precision, tokens and statistics."""
    return {
        "name": source.name,
        "model": source.fingerprint,
        "blocks": len(source),
        **_precision(source),
        "tokens": tokens.describe(),
        "statistics": sorted(statistics),
    }


def run_identity(
    source: DenseModel, method: Method, tokens: CalibrationData | None, moments: MomentStore | None, mode: str
) -> dict[str, Any]:
    """Return the identity of a compression: method and options, model, precision, calibration.

    Args:
        moments: in place of tokens.
    """
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in method.describe().items()}
    return {
        "method": options.pop("method"),
        "options": options,
        "mode": mode,
        **_base_model(source),
        "calibration": tokens.describe() if tokens else present(moments).identity["tokens"],
    }


def comparison_identity(source: DenseModel, calibration: dict[str, Any], measures: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of a comparison, without methods and sparsities: rows of equal identity can be compared."""
    return {
        **_base_model(source),
        "device": source.device.type,
        "calibration": calibration,
        "measures": measures,
    }


def _base_model(source: DenseModel) -> dict[str, Any]:
    return {
        "base_model": source.name,
        **({"revision": source.revision} if source.revision else {}),
        "fingerprint": source.fingerprint,
        **_precision(source),
    }


def _precision(source: DenseModel) -> dict[str, Any]:
    autocast = str(source.autocast).removeprefix("torch.") if source.autocast else None
    batch = batch_tokens(source)  # of an accelerator by its memory; sums depend on it
    found = {"dtype": dtype_name(source), "autocast": autocast}
    return found | ({"batch_tokens": batch} if batch != BATCH_TOKENS else {})


def dtype_name(source: DenseModel) -> str:
    """Return the dtype that weights are stored in."""
    return str(source.dtype).removeprefix("torch.")


def published_counts(the_plan: Plan) -> dict[str, Any]:
    """Return exact counts of the compressed model, for its config."""
    return {
        "sparsity": the_plan.sparsity,
        "counted_weights": the_plan.counted_weights,
        "removed_weights": the_plan.removed_weights,
        "parameters": the_plan.parameters_after,
        "bytes": the_plan.bytes_after,
        "kv_bytes_per_token": the_plan.kv_bytes_per_token_after,
        **({"active_parameters": the_plan.active_parameters_after} if the_plan.experts else {}),
        **({"zeros": the_plan.facts["zeros"]} if "zeros" in the_plan.facts else {}),  # where they stay in the tensors
    }
