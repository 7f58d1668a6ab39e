"""Read what earlier versions recorded of a method: old names of options and values become the ones of today."""

from collections.abc import Mapping
from dataclasses import fields

from .registry import METHODS, method_class

RENAMED = {
    "of": "scope",
    "protect": "exclude_blocks",
    "multiple": "rank_multiple",
    "select": "selection",
    "select_qk": "selection_qk",
    "sensitivity": "output_weighting",
    "feedback": "residual_correction",
    "removal": "allow_module_removal",
}
VALUES = {
    ("selection", "elimination"): "obs",
    ("selection_qk", "elimination"): "obs",
    ("output_weighting", "gradient"): "fisher",
}
# Option object -> its options that stood beside it, by the names of today.
PARTS = {
    "owl": {"threshold": "outlier", "spread": "spread"},
    "influence": {"temperature": "epsilon"},
    "influence-modules": {"temperature": "epsilon"},
    "bytes": {"context": "context", "batch": "batch"},
    "flops": {"context": "context"},
    "latency": {"context": "context"},
}
ABSORBED = {"epsilon", "outlier", "spread", "context", "batch"}


def upgraded(options: Mapping) -> dict:
    """Return the options of a method, as a record holds them, by today's names; those of today stay as they are."""
    if "scope" in options:
        return dict(options)
    renamed = {RENAMED.get(key, key): value for key, value in options.items() if key not in ABSORBED}
    if options.get("method") in METHODS:  # some have fewer options today
        known = {"method", *(field.name for field in fields(method_class(options["method"])))}
        renamed = {key: value for key, value in renamed.items() if key in known}
    found: dict = {
        key: VALUES.get((str(key), value), value) if isinstance(value, str) else value for key, value in renamed.items()
    }
    for kind in ("allocation", "budget"):
        parts = {new: options.get(old) for new, old in PARTS.get(str(found.get(kind)), {}).items()}
        given = ",".join(f"{key}={value}" for key, value in parts.items() if value is not None)
        found |= {kind: f"{found[kind]}:{given}"} if given else {}
    return found
