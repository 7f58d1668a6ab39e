"""Perplexity of a named model on a named text."""

import logging
from pathlib import Path

from ..calibration.text import read_text
from ..calibration.tokens import tokenised
from ..checkpoint.load import load_model, load_tokenizer
from ..errors import OptionError
from .perplexity import perplexity, windows_of

__all__ = ["evaluate_text"]

log = logging.getLogger(__name__)


def evaluate_text(
    model: str | Path,
    text: str,
    *,
    length: int = 2048,
    limit: int | None = None,
    field: str = "text",
    dtype: str = "auto",
    device: str = "auto",
) -> dict:
    """Load a model and compute its perplexity on a text source; see :func:`~rankfold.evaluation.perplexity.perplexity`.

    Warns where a compressed model was calibrated on the very text.

    Raises:
        OptionError, DataError, CheckpointError: with one line saying what to do.
    """
    if length < 2 or (limit is not None and limit < 1):
        raise OptionError(f"length must be >= 2 and limit >= 1, got {length} and {limit}")
    source = read_text(text, use="evaluation", field=field, characters=None if limit is None else limit * length * 8)
    network = load_model(model, dtype=dtype, device=device)
    config = network.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or length
    if length > context:
        log.info("length %d is more than the model's context; using %d", length, context)
        length = context
    if source.origin in _calibrated_on(network):
        log.warning("warning: %s was calibrated on this very text (%s); its perplexity here is too good", model, text)
    ids = tokenised(load_tokenizer(model), source.joined(), str(model), config.vocab_size)
    return {"model": str(model), "text": text, **perplexity(network, windows_of(ids, length, limit))}


def _calibrated_on(network) -> list[str]:
    """Origins of the texts that a compressed model was calibrated on."""
    described = getattr(getattr(network, "hf_quantizer", None), "quantization_config", None)
    calibration = getattr(described, "fields", {}).get("calibration", {})
    return [text.get("origin") for text in calibration.get("texts", [calibration])]
