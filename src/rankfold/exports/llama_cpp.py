"""What llama.cpp computes of what a model does; asked before its file format, a package of its own, is imported.

Shape legend: N width of a head.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from .._utils.present import present
from ..architectures import FIXED_ROTARY
from ..errors import UnsupportedModelError, option
from ..models.dense_model import DenseModel
from ..models.gguf_config import gemma3_scalar
from .form import StockModel

SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh",)
FULL, WINDOW = "full_attention", "sliding_attention"  # kinds of layers in the config of a family with both


@dataclass(frozen=True)
class Arch:
    """One of llama.cpp's architectures.

    Attributes:
        name: in a file, under ``general.architecture``.
        rope_style: which rows of a head it rotates together, see :class:`~rankfold.architectures.AttentionSpec`.
        has_factors: whether it divides rotary frequencies by those of a file.
        has_biases: whether it adds the biases that its family may have.
        has_windows: whether five blocks of six have a sliding window and rotary frequencies of their own.
        activations: names of what it computes between the two halves of an MLP.
        rotary: kinds of rotary embeddings, of blocks without a window.
    """

    name: str
    rope_style: Literal["neox", "gptj"] = "neox"
    has_factors: bool = False
    has_biases: bool = True
    has_windows: bool = False
    activations: tuple[str, ...] = SILU
    rotary: tuple[str, ...] = FIXED_ROTARY


LLAMA, DECI = Arch("llama", "gptj", has_factors=True), Arch("deci", "gptj", has_factors=True)
OF_LLAMA = ("llama", "mistral")
OF_DECI = (*OF_LLAMA, "qwen2")  # families that `deci` computes too, with an MLP of its own width in each block
ARCHS = dict.fromkeys(OF_LLAMA, LLAMA) | {
    "qwen2": Arch("qwen2"),
    "qwen3": Arch("qwen3", has_biases=False),
    "gemma3_text": Arch("gemma3", has_biases=False, has_windows=True, activations=GELU, rotary=("default", "linear")),
}


def check_family(source: DenseModel, families: tuple[str, ...]) -> None:
    """Raise :class:`UnsupportedModelError` unless llama.cpp computes what the model does, in one of the families."""
    config = source.config  # other families have other fields
    if source.model.config.get_text_config() is not source.model.config:
        raise UnsupportedModelError(
            f"this form holds a model of text alone, and {source.name} is a {type(source.model).__name__}; use "
            f"{option('format', 'stock')}, and the converter of the engine you want"
        )
    own = ARCHS.get(config.model_type, LLAMA)
    found = {
        "model type": (config.model_type, families),
        "activation": (getattr(config, "hidden_act", getattr(config, "hidden_activation", None)), own.activations),
        "rotary embedding": (rotary_of(config).get("rope_type", "default"), own.rotary),
    }
    for what, (got, allowed) in found.items():
        if got not in allowed:
            raise UnsupportedModelError(
                f"this form takes a {what} out of {', '.join(allowed)}, got {got}; use {option('format', 'stock')}, "
                "and the converter of the engine you want"
            )


def arch_of(form: StockModel, factors: np.ndarray | None) -> Arch:
    """Return the architecture that a model of one of the families of :data:`ARCHS` is written as: its family's own, or
    ``deci`` where that lacks the widths or the :func:`frequency_factors`."""
    own = ARCHS[form.config.model_type]
    return DECI if form.layers or (factors is not None and not own.has_factors) else own


def check_own(form: StockModel) -> None:
    """Raise :class:`UnsupportedModelError` unless the architecture of its family computes what a model does."""
    family, lacks = form.config.model_type, None
    own = ARCHS[family]
    if arch_of(form, frequency_factors(form)) is not own:
        lacks = "rotary frequencies other than the plain ones"
    elif getattr(form.config, "attention_bias", False) and not own.has_biases:
        lacks = "biases"
    elif own.has_windows:
        lacks = _lacks(form.config)
    if lacks:
        other = f"{option('format', 'gguf-deci')}, or " if family in OF_DECI else ""
        raise UnsupportedModelError(
            f"llama.cpp's {own.name} has no {lacks}, which this model has; use {other}{option('format', 'stock')}"
        )


def rotary_of(config) -> Mapping[str, Any]:
    """Return the rotary parameters of a config, of blocks without a window where there are others."""
    found = getattr(config, "rope_parameters", None) or {}
    return found.get(FULL, found)


def _lacks(config) -> str | None:
    """Return what a Gemma 3 has that llama.cpp's lacks; ``None`` where that is nothing. Files say little of it."""
    kinds = [WINDOW if number % 6 else FULL for number in range(1, len(config.layer_types) + 1)]
    scalar, windowed = config.query_pre_attn_scalar, config.rope_parameters.get(WINDOW, {})
    reasons = {
        "sliding windows in other blocks than five of six": [*config.layer_types] != kinds,
        "stretched rotary frequencies in blocks with a window": windowed.get("rope_type", "default") != "default",
        "attention in both directions": config.use_bidirectional_attention,
        "soft caps": config.attn_logit_softcapping or config.final_logit_softcapping,
        f"scores divided by the root of {scalar}": scalar != gemma3_scalar(config),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def frequency_factors(form: StockModel) -> np.ndarray | None:
    """``(N / 2,)`` what llama.cpp divides every rotary frequency by; ``None`` where they are plain, or blocks with a
    window have others, which settings say."""
    if ARCHS[form.config.model_type].has_windows:
        return None
    found = present(DenseModel(form.empty(torch.float32), "", torch.device("cpu"), torch.float32).inv_freq(0))
    plain = rotary_of(form.config)["rope_theta"] ** -(torch.arange(len(found)) / len(found))
    factors = plain / found
    return None if torch.allclose(factors, torch.ones_like(factors), rtol=1e-5) else factors.float().numpy()


def context_of(config) -> int:
    """Return the tokens of the longest window that a file computes alike: architectures without sliding windows do so
    as far as one reaches."""
    window = None if ARCHS[config.model_type].has_windows else getattr(config, "sliding_window", None)
    return min(window or sys.maxsize, config.max_position_embeddings)
