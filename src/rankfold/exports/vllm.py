"""What vLLM's backend for transformers models does not run; asked before vLLM, a package of its own, is imported."""

from collections.abc import Iterator
from typing import Any

_BIASED = ("bloom", "gpt_neo", "mpt")  # in attention that stays dense, too
_WITHOUT_ATTENTION = {"conv", "hybrid", "linear_attention", "mamba", "mlp", "moe", "recurrent"}  # in `layer_types`


def why_refused(config: Any, modules: dict[str, dict]) -> str | None:
    """Return why a compressed model is not run, and what to do; ``None`` where it is.

    Args:
        config: of the model.
        modules: their descriptions in ``quantization_config``.
    """
    config = config.get_text_config()
    specs = [*_descriptions(modules)]
    attentions = [spec for spec in specs if spec.get("kind") == "attention"]
    own_mask = any(spec.get("alibi") or spec.get("window") or not spec.get("causal", True) for spec in attentions)
    has_sinks = config.model_type == "gpt_oss" or any(spec.get("sinks") for spec in attentions)
    kinds = {*(getattr(config, "layer_types", None) or ())}
    reasons = {
        "a residual stream that changes its width (slicegpt)": any(s.get("kind") == "shortcut_block" for s in specs),
        "bases that several blocks share (basis-sharing)": any(spec.get("basis") for spec in specs),
        "a mask or a bias of its own on its scores": (
            own_mask or config.model_type in _BIASED or getattr(config, "alibi", False)
        ),
        "attention sinks": has_sinks,
        "attention that counts positions itself": config.model_type == "llama4_text",
        "blocks without attention": bool(kinds & _WITHOUT_ATTENTION),
    }
    found = next((what for what, applies in reasons.items() if applies), None)
    return found and f"this {config.model_type} has {found}, which vLLM's backend does not run; use transformers"


def _descriptions(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the descriptions of modules and of the layers inside of them."""
    for value in found.values():
        if isinstance(value, dict):
            yield value
            yield from _descriptions(value)
