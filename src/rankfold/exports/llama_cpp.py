"""What llama.cpp computes of what a model does; asked before its file format, a package of its own, is imported.

Shape legend: N width of a head.
"""

import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from .._utils.present import present
from ..architectures import FIXED_ROTARY
from ..errors import UnsupportedModelError, option
from ..models.dense_model import DenseModel
from .form import StockModel


@dataclass(frozen=True)
class Arch:
    """One of llama.cpp's architectures.

    Attributes:
        name: in a file, under ``general.architecture``.
        rope_style: which rows of a head it rotates together, see :class:`~rankfold.architectures.AttentionSpec`.
        has_factors: whether it divides rotary frequencies by those of a file.
        has_biases: whether it adds the biases that its family may have.
    """

    name: str
    rope_style: Literal["neox", "gptj"] = "neox"
    has_factors: bool = False
    has_biases: bool = True


LLAMA, DECI = Arch("llama", "gptj", has_factors=True), Arch("deci", "gptj", has_factors=True)
OF_LLAMA = ("llama", "mistral")
OF_DECI = (*OF_LLAMA, "qwen2")  # families that `deci` computes too, with an MLP of its own width in each block
ARCHS = dict.fromkeys(OF_LLAMA, LLAMA) | {"qwen2": Arch("qwen2"), "qwen3": Arch("qwen3", has_biases=False)}


def check_family(source: DenseModel, families: tuple[str, ...]) -> None:
    """Raise :class:`UnsupportedModelError` unless llama.cpp computes what the model does, in one of the families."""
    config = source.config  # other families have other fields
    if source.model.config.get_text_config() is not source.model.config:
        raise UnsupportedModelError(
            f"this form holds a model of text alone, and {source.name} is a {type(source.model).__name__}; use "
            f"{option('format', 'stock')}, and the converter of the engine you want"
        )
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    found = {
        "model type": (config.model_type, families),
        "activation": (getattr(config, "hidden_act", None), ("silu", "swish")),
        "rotary embedding": (rotary, FIXED_ROTARY),
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
    if lacks:
        other = f"{option('format', 'gguf-deci')}, or " if family in OF_DECI else ""
        raise UnsupportedModelError(
            f"llama.cpp's {own.name} has no {lacks}, which this model has; use {other}{option('format', 'stock')}"
        )


def frequency_factors(form: StockModel) -> np.ndarray | None:
    """``(N / 2,)`` what llama.cpp divides every rotary frequency by; ``None`` where they are plain."""
    found = present(DenseModel(form.empty(torch.float32), "", torch.device("cpu"), torch.float32).inv_freq(0))
    plain = form.config.rope_parameters["rope_theta"] ** -(torch.arange(len(found)) / len(found))
    factors = plain / found
    return None if torch.allclose(factors, torch.ones_like(factors), rtol=1e-5) else factors.float().numpy()


def context_of(config) -> int:
    """Return the tokens of the longest window that a file computes alike; no arch of :data:`ARCHS` has a sliding
    window."""
    return min(getattr(config, "sliding_window", None) or sys.maxsize, config.max_position_embeddings)
