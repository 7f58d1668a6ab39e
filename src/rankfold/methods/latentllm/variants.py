"""The local methods LatentLLM is compared with: its options set to what each of them does."""

from dataclasses import dataclass
from typing import ClassVar

from ..base import register_method
from .method import LatentLLM

__all__ = ["ASVD", "FWSVD", "SVD", "SVDLLM", "RootCov"]


@register_method
@dataclass(frozen=True)
class RootCov(LatentLLM):
    """Local low rank by root covariance, with block identity: LatentLLM without its joint forms."""

    name: ClassVar[str] = "rootcov"
    joint: str = "none"


@register_method
@dataclass(frozen=True)
class SVDLLM(RootCov):
    """Root covariance by whitening, plain factors: what SVD-LLM (arXiv:2403.07378) does before its update step."""

    name: ClassVar[str] = "svd-llm"
    junction: str = "symmetric"


@register_method
@dataclass(frozen=True)
class ASVD(SVDLLM):
    """Diagonal pre-conditioning by mean absolute activations to the power alpha: ASVD (arXiv:2312.05821)."""

    name: ClassVar[str] = "asvd"
    precondition: str = "l1"


@register_method
@dataclass(frozen=True)
class SVD(SVDLLM):
    """Plain SVD of the weights."""

    name: ClassVar[str] = "svd"
    precondition: str = "identity"


@register_method
@dataclass(frozen=True)
class FWSVD(SVDLLM):
    """SVD of the weights with every column weighed by the empirical Fisher of its entries: FWSVD (arXiv:2207.00112).

    The paper's rows: its weights multiply inputs from the right, so its rows are the inputs of a layer, columns here. Left out:
    training afterwards.
    """

    name: ClassVar[str] = "fwsvd"
    precondition: str = "fisher"
