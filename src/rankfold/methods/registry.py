"""Which methods there are, without importing any of them: ``rankfold --help`` needs the names, not PyTorch."""

import importlib
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import check_choice

if TYPE_CHECKING:
    from .base import Method


class Entry(NamedTuple):
    """Where a method is implemented, and what it does in one line."""

    module: str  # relative to rankfold.methods
    class_name: str
    summary: str
    paper: str = ""  # arXiv number; empty for rankfold's own


METHODS = {
    "rankfold": Entry(
        "rankfold.method",
        "Rankfold",
        "Smaller MLPs and heads, fitted to dense outputs; ranks by measured loss",
    ),
    "modegpt": Entry("modegpt.method", "MoDeGPT", "Fewer MLP units, rotary pairs and value dimensions", "2408.09632"),
    "latentllm": Entry(
        "latentllm.method", "LatentLLM", "Low rank in every linear layer, jointly in attention", "2505.18413"
    ),
    "rootcov": Entry("baselines.svd_family", "RootCov", "SVD-LLM with an identity block in its factors", "2505.18413"),
    "svd": Entry("baselines.svd_family", "SVD", "Truncated SVD of the weights"),
    "svd-llm": Entry("baselines.svd_family", "SVDLLM", "SVD after whitening the inputs", "2403.07378"),
    "aa-svd": Entry(
        "baselines.anchored", "AASVD", "SVD-LLM on the compressed inputs, for the dense outputs", "2604.02119"
    ),
    "basis-sharing": Entry(
        "baselines.basis_sharing", "BasisSharing", "SVD-LLM, one basis for neighbouring blocks", "2410.03765"
    ),
    "asvd": Entry("baselines.svd_family", "ASVD", "SVD after scaling by mean absolute activations", "2312.05821"),
    "fwsvd": Entry(
        "baselines.svd_family", "FWSVD", "SVD weighted by the Fisher information of each column", "2207.00112"
    ),
    "zs-svd": Entry(
        "baselines.zero_sum", "ZSSVD", "SVD-LLM, ranks so that expected loss changes sum to zero", "2602.02848"
    ),
    "bolaco": Entry("baselines.svd_family", "Bolaco", "Principal components of each layer's outputs", "2405.10616"),
    "slicegpt": Entry("baselines.slicegpt.method", "SliceGPT", "A narrower residual stream", "2401.15024"),
    "slicegpt+modegpt": Entry("baselines.slicegpt.combined", "SliceGPTMoDeGPT", "SliceGPT after MoDeGPT", "2408.09632"),
    "shortgpt": Entry(
        "baselines.block_removal", "ShortGPT", "Remove the blocks that change the residual stream least", "2403.03853"
    ),
    "sleb": Entry(
        "baselines.block_removal", "SLEB", "Remove blocks one at a time, by the loss without them", "2402.09025"
    ),
    "reap": Entry("baselines.reap", "REAP", "Remove whole experts by router weight times output norm", "2510.13999"),
    "flap": Entry(
        "baselines.structured.variants", "FLAP", "Keep the MLP units and heads that fluctuate most", "2312.11983"
    ),
    "llm-pruner": Entry(
        "baselines.structured.gradients", "LLMPruner", "Keep units and heads by weight times gradient", "2305.11627"
    ),
    "llm-surgeon": Entry(
        "baselines.structured.kronecker", "LLMSurgeon", "Kronecker-factored Fisher, updates of the rest", "2312.17244"
    ),
    "kobd": Entry(
        "baselines.structured.kronecker", "KOBD", "Kronecker-factored Fisher of MLP units and heads", "1905.05934"
    ),
    "obd": Entry("baselines.structured.gradients", "OBD", "Remove units and heads by the diagonal Fisher"),
    "magnitude": Entry(
        "baselines.structured.variants", "Magnitude", "Keep the units and heads with the largest weights", "1506.02626"
    ),
    "strided": Entry("baselines.structured.variants", "Strided", "Keep every n-th unit and head"),
    "sparsegpt": Entry("baselines.semi_structured", "SparseGPT", "2:4 sparsity by optimal brain surgery", "2301.00774"),
    "wanda": Entry("baselines.semi_structured", "Wanda", "2:4 sparsity by weight times input norm", "2306.11695"),
    "pruner-zero": Entry(
        "baselines.semi_structured", "PrunerZero", "2:4 sparsity by weights and gradients", "2406.02924"
    ),
}

_REGISTERED: dict[str, "type[Method]"] = {}  # by other packages


def register_method(cls: "type[Method]") -> "type[Method]":
    """Make a method of another package known by its ``name``; a decorator.

    Raises:
        ValueError: there is a method of this name.
    """
    if cls.name in method_names():
        raise ValueError(f"method {cls.name!r} is registered twice")
    _REGISTERED[cls.name] = cls
    return cls


def method_names() -> tuple[str, ...]:
    """Return the names of all methods, sorted."""
    return tuple(sorted(METHODS.keys() | _REGISTERED))


def method_class(name: str) -> "type[Method]":
    """Return the class of a method.

    Raises:
        OptionError: unknown method, with a suggestion.
    """
    check_choice("method", name, method_names())
    if name in _REGISTERED:
        return _REGISTERED[name]
    entry = METHODS[name]
    return getattr(importlib.import_module(f"{__package__}.{entry.module}"), entry.class_name)


def make_method(name: str, **options: Any) -> "Method":
    """Make a method by its name.

    Raises:
        OptionError: unknown method or option, with a suggestion.
    """
    cls = method_class(name)
    for key in options:
        check_choice(f"{name} option", key, [f.name for f in fields(cls)])
    return cls(**options)


def as_method(method: "Method | str") -> "Method":
    """Return a method, by itself or by its name, with its defaults.

    Raises:
        OptionError: unknown method, with a suggestion.
    """
    return make_method(method) if isinstance(method, str) else method
