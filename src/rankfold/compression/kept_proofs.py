"""Proofs of derived specs, kept beside the cache of the hub: a proof reads all weights two or three times.

A proof holds for the weights, the spec that was read off the blocks, and the versions of what runs them. Only models on
disk are run by nothing but the code of these versions, so proofs of models in memory are not kept.
"""

import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from .._utils.files import read_json, write_json
from .._utils.schema import NUMBER, Maybe, check_record
from ..architectures import Architecture, left_dense
from ..errors import CheckpointError
from ..models.dense_model import DenseModel
from ..report.record import versions

log = logging.getLogger(__name__)

KEPT: dict[str, Any] = {  # what names do not show and a proof finds
    "traits": {"returns_tuple": bool, "middle": Maybe(str), "is_plain_residual": bool},
    "attention": {
        "layout": str,
        "rope_style": str,
        "interleaved_table": bool,
        "position": str,
        "applies_rope": Maybe(str),
    },
    "left_dense": Maybe(str),
    "cached": Maybe([int]),
    "differences": {"logits": NUMBER, "replaced": Maybe(NUMBER)},
}


def load_proof(source: DenseModel) -> tuple[Architecture, float, float | None] | None:
    """Return what :func:`keep_proof` kept of this model: spec and differences; ``None`` where there is nothing."""
    if source.bytes_on_disk is None or not (place := _place(source)).exists():
        return None
    try:
        found = read_json(place)
        check_record(found, KEPT, place)
    except CheckpointError as error:
        log.info("%s; proving the spec again", error)
        return None
    given, differences = source.architecture, found["differences"]
    attention = replace(given.attention, **found["attention"])
    if why := found["left_dense"]:
        attention = left_dense(attention, why)
    cached = found["cached"] and tuple(found["cached"])
    spec = replace(given, attention=attention, cached=cached, **found["traits"])
    return spec, differences["logits"], differences["replaced"]


def keep_proof(source: DenseModel, spec: Architecture, logits: float, attention: float | None) -> None:
    """Keep a proof for later runs, where the cache can be written.

    Args:
        source: with the spec that was read off its blocks.
        spec: what was proved.
        logits, attention: relative differences that were found; see :class:`~.validate_spec.Proof`.
    """
    if source.bytes_on_disk is None:
        return
    kept = {
        "traits": {name: getattr(spec, name) for name in KEPT["traits"]},
        "attention": {name: getattr(spec.attention, name) for name in KEPT["attention"]},
        "left_dense": spec.attention.unsupported_reason,
        "cached": spec.cached,
        "differences": {"logits": logits, "replaced": attention},
    }
    place = _place(source)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, kept)
    except (OSError, CheckpointError) as error:
        log.info("the proof of the spec is not kept: %s", error)


def _place(source: DenseModel) -> Path:
    known = json.dumps([source.fingerprint, repr(source.architecture), versions()], sort_keys=True)
    name = hashlib.sha256(known.encode()).hexdigest()[:32]
    return Path(constants.HF_HOME, "rankfold", "specs", f"{name}.json")
