"""What a number depends on: equal identities mean equal results."""

__all__ = ["comparison_identity", "dtype_name", "moments_identity", "published_counts", "run_identity"]


def moments_identity(source, tokens, statistics) -> dict:
    """Of moments: model, precision, tokens and statistics."""
    return {
        "name": source.name,
        "model": source.fingerprint,
        "blocks": len(source),
        "dtype": dtype_name(source),
        "autocast": str(source.autocast).removeprefix("torch.") if source.autocast else None,
        "tokens": tokens.describe(),
        "statistics": sorted(statistics),
    }


def run_identity(source, method, calibration: dict, mode: str) -> dict:
    """Of a compression: method and options, model, precision, calibration."""
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in method.describe().items()}
    return {
        "method": options.pop("method"),
        "options": options,
        "mode": mode,
        "base_model": source.name,
        **({"revision": source.revision} if source.revision else {}),
        "fingerprint": source.fingerprint,
        "dtype": dtype_name(source),
        "autocast": str(source.autocast).removeprefix("torch.") if source.autocast else None,
        "calibration": calibration,
    }


def comparison_identity(source, calibration: dict, measures: dict) -> dict:
    """Of a comparison, without its methods and sparsities: rows of equal identity may stand beside each other."""
    return {
        "base_model": source.name,
        **({"revision": source.revision} if source.revision else {}),
        "fingerprint": source.fingerprint,
        "dtype": dtype_name(source),
        "autocast": str(source.autocast).removeprefix("torch.") if source.autocast else None,
        "device": source.device.type,
        "calibration": calibration,
        "measures": measures,
    }


def dtype_name(source) -> str:
    """Precision weights are stored in."""
    return str(source.dtype).removeprefix("torch.")


def published_counts(the_plan) -> dict:
    """Exact counts of the compressed model, for its config."""
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
